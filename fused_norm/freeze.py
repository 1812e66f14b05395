"""Freezing: the only way in which something made from parameters outlives a call."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fused_norm.call import contexts, frozen
from fused_norm.call.frozen import Frozen
from fused_norm.call.offload import key_of

Model = TypeVar("Model", bound=nn.Module)
# A weight may leave the device if it is small, or a small part of all.
_SMALL_BYTES, _PARTS = 32 << 20, 16
# What reads all values of a module: `to` and the like, and copying and pickling.
_MOVE_OR_COPY = ("_apply", "__getstate__")


def freeze(model: Model, *, offload: bool = False) -> Model:
    """Promise not to change a model's parameters, so that calls may keep copies made from them.

    On Hopper, inference in bfloat16 is often fastest with a fold: a copy of the weight with gamma
    multiplied in, and its rows centered. In FP8, calls need their weights in 8 bits. Normally, each
    call makes these copies. In a frozen model, the first call makes them, and later calls and CUDA
    graphs reuse them.

    A write to a frozen parameter goes unnoticed. Its gradient is an error in `backward`. Freezing
    ends with `unfreeze`, with `train()` of any of the modules, with `load_state_dict`, and for a
    parameter whose memory is replaced, such as by an assignment to its `data`.

    Args:
        model: A model in evaluation mode.
        offload: Whether a weight that was copied moves to the host's memory, so that a frozen model
            needs no more of the device's. The weight then reads as NaN, until freezing ends, as it
            then also does with `state_dict`, with `to` and the like, and where the module is copied
            or pickled. Weights that several modules share, and those of more than a
            sixteenth of all weights' memory (and 32 MiB), are neither moved nor copied.

    Returns:
        The model.

    Raises:
        RuntimeError: If a module is in training mode.
    """
    modules = list(model.modules())
    if any(module.training for module in modules):
        raise RuntimeError("freeze() needs a model in evaluation mode: call model.eval() first")
    unfreeze(model)
    record = Frozen()
    parameters = list(model.parameters())
    if offload:
        uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
        matrices = [p for p in parameters if p.dim() == 2]
        # The placeholder of all offloaded weights is as large as the largest of them.
        most = max(_SMALL_BYTES, sum(p.nbytes for p in matrices) // _PARTS)
        for p in matrices:
            if uses[id(p)] == 1 and p.nbytes <= most:
                record.offload.candidates[key_of(p)] = p
            else:
                record.offload.staying.add(key_of(p))
    _freeze(record, parameters, modules)
    return model


def freeze_parameters(parameters: Iterable[Tensor], modules: Iterable[nn.Module] = ()) -> Frozen:
    """Freeze parameters for as long as the returned object is held.

    Args:
        parameters: The parameters of a compiled graph.
        modules: Their owners, if known: their `train()` ends the freezing.
    """
    record = Frozen()
    _freeze(record, list(parameters), modules)
    return record


def unfreeze(model: Model) -> Model:
    """End the freezing of a model's parameters, by `freeze` or by the backend's option.

    Copies that CUDA graphs read live as long as the memory of the parameters.

    Args:
        model: A model, or a part of one. Everything that was frozen together with its parameters is
            unfrozen.

    Returns:
        The model.
    """
    for record in frozen.of(model.parameters()):
        record.thaw()
    return model


def frozen_parameters(model: nn.Module | None = None) -> AbstractContextManager[None]:
    """Promise not to change the parameters that this thread's calls use in a `with` block.

    Works as `freeze`, for any parameter, from its second call on. Copies that CUDA graphs captured
    in the block read live as long as the memory of the parameters.

    Gradients are allowed. In FP8, the micro-batches of a step share their weights in 8 bits, and so
    do a forward and what a checkpoint recomputes. Take the optimizer's step after the block.

    Args:
        model: A model whose parameters are frozen from their first call on, in all threads.
    """
    return contexts.Context(() if model is None else model.parameters())


def _freeze(record: Frozen, parameters: Sequence[Tensor], modules: Iterable[nn.Module]) -> None:
    for parameter in parameters:
        if parameter.requires_grad and not parameter.is_inference():
            record.on_thaw.append(parameter.register_hook(_refuse).remove)
    for module in modules:
        # The hooks stay: they could not be removed while they run. The others do no harm.
        if not any(hook is _thaw_offloaded for hook in module._state_dict_pre_hooks.values()):
            module.register_load_state_dict_pre_hook(_thaw)
            module.register_state_dict_pre_hook(_thaw_offloaded)
        names = _MOVE_OR_COPY if record.offload.candidates else ()
        for name in ("train", *names):
            if not isinstance(method := vars(module).get(name), _Method):
                method = vars(module)[name] = _Method(module, name, method)
            method.records.append(record)
        record.on_thaw.append(_Release(module, record))
    record.admit(p for p in parameters if p.layout is torch.strided)


class _Method:
    """Replaces a method of a module, and ends freezing first. It owns the frozen parameters.

    `train(False)` does not end it. Copies and pickled modules have one that only calls the method.

    Attributes:
        own: What the user has set as this method, None for that of the class.
        records: What froze the module's parameters, more than one if several graphs read them.
    """

    def __init__(self, module: nn.Module, name: str, own: Callable[..., Any] | None) -> None:
        # Not the module itself: a reference cycle would keep its memory until garbage collection.
        self._module, self._name = weakref.ref(module), name
        self.own, self.records = own, list[Frozen]()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None
        if self._name != "train" or all((*args, *kwargs.values())):
            for record in tuple(self.records):
                record.thaw()
        if self.own is not None:
            return self.own(*args, **kwargs)
        method = getattr(type(module), self._name, None)
        # Before Python 3.11, objects have no `__getstate__`.
        return vars(module).copy() if method is None else method(module, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {"module": self._module(), "name": self._name, "own": self.own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        _Method.__init__(self, **state)


class _Release:
    """Takes what froze parameters from their module, and restores its methods after the last."""

    def __init__(self, module: nn.Module, record: Frozen) -> None:
        self._module, self._record = weakref.ref(module), weakref.ref(record)

    def __call__(self) -> None:
        module, record = self._module(), self._record()
        for name in ("train", *_MOVE_OR_COPY) if module is not None else ():
            method = vars(module).get(name)
            if isinstance(method, _Method) and record in method.records:
                method.records.remove(record)
                if not method.records and method.own is None:
                    del vars(module)[name]
                elif not method.records:
                    vars(module)[name] = method.own


def _refuse(_: Tensor) -> None:
    raise RuntimeError(
        "this parameter is frozen: call model.train() or fused_norm.unfreeze(model) before a "
        "forward whose gradients are taken"
    )


def _thaw(module: nn.Module, *_: object) -> None:
    unfreeze(module)


def _thaw_offloaded(module: nn.Module, *_: object) -> None:
    for record in frozen.of(module.parameters(recurse=False)):
        if record.offload.may_have_any():
            record.thaw()
