# SPDX-License-Identifier: Apache-2.0
"""Reference models. `loongforge.models.gr00t_n16` is the multimodal mixture-of-experts model of the main job."""
