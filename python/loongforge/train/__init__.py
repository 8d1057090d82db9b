# SPDX-License-Identifier: Apache-2.0
"""`loongforge train`: a run from options to summary."""
