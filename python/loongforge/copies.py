# SPDX-License-Identifier: Apache-2.0
"""What must not travel with a copy of the module it sits in: hooks, plans, owners of a map."""

from __future__ import annotations

import weakref


class StaysBehind:
    """Base of what belongs to one module alone: in a deepcopy or a pickle of the module there is an empty one instead, as its
    constructor makes it without arguments."""

    def __deepcopy__(self, memo):
        return type(self)()

    def __reduce__(self):
        return type(self), ()


class Hook(StaysBehind):
    """Calls a method without keeping its object alive; nothing, when the object is gone or in a copy."""

    def __init__(self, bound=None):
        self._bound = weakref.WeakMethod(bound) if bound is not None else None

    def __call__(self, *args, **kwargs):
        method = self._bound() if self._bound is not None else None
        return method(*args, **kwargs) if method is not None else None


class Owner(StaysBehind):
    """Keeps a model's map alive as long as the model; a copy of the model owns none."""

    def __init__(self, held=None):
        self.held = held
