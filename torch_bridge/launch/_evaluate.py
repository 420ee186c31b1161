"""Functions of JAX arrays evaluated with torch tensors, on any device: how weights come into a kernel's layout.

``moe_jax`` says in JAX what the layouts are. Where JAX has no runtime on the GPU, such a function is traced and its
operations are done by torch, one after another. The results have the same bits: integers, moves, and single float32
operations. 32-bit words are int32 in torch, whatever their sign means.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax.extend import core

from torch_bridge._tensors import numpy_dtype, torch_dtype

_WORDS = {np.dtype(np.uint32): torch.int32, np.dtype(np.uint16): torch.int16}


class Evaluator:
    """A function, traced once for one set of shapes."""

    def __init__(self, function: Callable[..., Any], *structs: Any):
        """structs: ShapeDtypeStructs in any pytree. Raises what the function raises under a trace."""
        self._closed, shape = jax.make_jaxpr(function, return_shape=True)(*structs)
        self.structs, self._structure = jax.tree.flatten(shape)

    def __call__(self, *args: Any) -> Any:
        """Tensors of one device in the trees of the structs -> tensors, views of them where only shapes change.

        Raises NotImplementedError for an operation that is not known here, by its name.
        """
        leaves = jax.tree.leaves(args)
        with torch.no_grad():
            return jax.tree.unflatten(self._structure, _run(self._closed, leaves, leaves[0].device))


def _run(closed: core.ClosedJaxpr, inputs: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    values = dict(zip(closed.jaxpr.invars, inputs, strict=True))
    values |= {v: _tensor(c, device) for v, c in zip(closed.jaxpr.constvars, closed.consts, strict=True)}

    def read(variable: Any) -> torch.Tensor:
        if isinstance(variable, core.Literal):
            return _tensor(np.asarray(variable.val, _aval(variable).dtype), device)
        return values[variable]

    last_use = {v: i for i, e in enumerate(closed.jaxpr.eqns) for v in e.invars if not isinstance(v, core.Literal)}
    kept = {v for v in closed.jaxpr.outvars if not isinstance(v, core.Literal)}
    for index, equation in enumerate(closed.jaxpr.eqns):
        found = [read(v) for v in equation.invars]
        results = _apply(equation, found, device)
        values |= zip(equation.outvars, results, strict=True)
        for variable in equation.invars:
            if not isinstance(variable, core.Literal) and last_use[variable] == index and variable not in kept:
                values.pop(variable, None)
    return [read(v) for v in closed.jaxpr.outvars]


def _apply(equation: core.JaxprEqn, found: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    name, params = equation.primitive.name, equation.params
    if name == "scan":
        return _run(_vectorized(params["jaxpr"], *_scan_sizes(equation), params["length"]), found, device)
    inner = next((v for v in params.values() if isinstance(v, core.ClosedJaxpr)), None)
    if inner is not None:
        return _run(inner, found, device)
    operation = _OPERATIONS.get(name)
    if operation is None:
        raise NotImplementedError(f"{name} is not known to the torch evaluator of layouts")
    results = operation(equation, *found)
    return [result.to(device) for result in (results if isinstance(results, tuple) else (results,))]


def _scan_sizes(equation: core.JaxprEqn) -> tuple[int, int]:
    """How many operands of a scan are the same in every step, and how many of these are carried; by their ranks, since
    versions of JAX say it in different ways."""
    body = equation.params["jaxpr"].jaxpr

    def count(outer: Any, inner: Any) -> int:
        return sum(a.aval.ndim == b.aval.ndim for a, b in zip(outer, inner, strict=True))

    return count(equation.invars, body.invars), count(equation.outvars, body.outvars)


@functools.lru_cache(maxsize=64)
def _vectorized(body: core.ClosedJaxpr, num_consts: int, num_carry: int, length: int) -> core.ClosedJaxpr:
    """All steps of a loop without a carry, such as ``lax.map`` over experts, at once."""
    if num_carry:
        raise NotImplementedError("a scan with a carry is not known to the torch evaluator of layouts")
    avals = [v.aval for v in body.jaxpr.invars]
    structs = [
        jax.ShapeDtypeStruct(a.shape if i < num_consts else (length, *a.shape), a.dtype) for i, a in enumerate(avals)
    ]
    axes = [None if i < num_consts else 0 for i in range(len(avals))]
    return jax.make_jaxpr(jax.vmap(core.jaxpr_as_fun(body), in_axes=axes))(*structs)


def _dtype(dtype: Any) -> torch.dtype:
    return _WORDS.get(np.dtype(dtype)) or torch_dtype(dtype)


def _tensor(value: Any, device: torch.device) -> torch.Tensor:
    array = np.asarray(value)
    if array.dtype in _WORDS:
        array = array.view(array.dtype.name[1:])
    if array.dtype.kind == "V" or array.dtype not in (np.float32, np.int32, np.int8, np.uint8, np.bool_, np.int16):
        bits = np.ascontiguousarray(array).view(f"uint{8 * array.itemsize}" if array.itemsize == 1 else "int16")
        return torch.from_numpy(bits.copy()).view(torch_dtype(array.dtype)).to(device)
    return torch.from_numpy(np.array(array)).to(device)


def _aval(variable: Any) -> Any:
    return variable.aval


def _out(equation: core.JaxprEqn) -> Any:
    return equation.outvars[0].aval


def _broadcast(equation: core.JaxprEqn, x: torch.Tensor, *_: Any) -> torch.Tensor:
    shape, kept = equation.params["shape"], equation.params["broadcast_dimensions"]
    sizes = [1] * len(shape)
    for dimension, size in zip(kept, x.shape, strict=True):
        sizes[dimension] = size
    return x.reshape(sizes).expand(shape)


def _convert(equation: core.JaxprEqn, x: torch.Tensor) -> torch.Tensor:
    given: Any = equation.invars[0].aval
    if given.dtype == np.uint32 and _out(equation).dtype.kind not in "iu":
        x = x.to(torch.int64) & 0xFFFFFFFF
    return x.to(_dtype(_out(equation).dtype))


def _bitcast(equation: core.JaxprEqn, x: torch.Tensor) -> torch.Tensor:
    aval, dtype = _out(equation), _dtype(_out(equation).dtype)
    if x.element_size() == dtype.itemsize:
        return x.view(dtype)
    if x.element_size() > dtype.itemsize:  # the parts are a new last axis
        return x.contiguous().unsqueeze(-1).view(dtype).reshape(aval.shape)
    return x.contiguous().view(dtype).reshape(aval.shape)


def _shift_right_logical(equation: core.JaxprEqn, x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    if x.dtype == torch.uint8:
        return x >> by
    last = 8 * x.element_size() - 1
    ones = torch.full_like(by, -1)
    return (x >> by) & ~((ones << (last - by)) << 1)


def _slice(equation: core.JaxprEqn, x: torch.Tensor) -> torch.Tensor:
    params = equation.params
    steps = params["strides"] or [1] * x.ndim
    return x[tuple(map(slice, params["start_indices"], params["limit_indices"], steps))]


def _concatenate(equation: core.JaxprEqn, *xs: torch.Tensor) -> torch.Tensor:
    return torch.cat(xs, equation.params["dimension"])


def _stack(equation: core.JaxprEqn, *xs: torch.Tensor) -> torch.Tensor:
    return torch.stack(xs, equation.params["axis"])


def _iota(equation: core.JaxprEqn, *_: Any) -> torch.Tensor:
    aval, axis = _out(equation), equation.params["dimension"]
    sizes = [1] * len(aval.shape)
    sizes[axis] = aval.shape[axis]
    return torch.arange(aval.shape[axis], dtype=_dtype(aval.dtype)).reshape(sizes).expand(aval.shape)


def _pad(equation: core.JaxprEqn, x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    config = equation.params["padding_config"]
    if any(inner for _, _, inner in config) or any(min(low, high) < 0 for low, high, _ in config):
        raise NotImplementedError("a pad between or of negative size is not known to the torch evaluator of layouts")
    y = value.to(x.device).reshape([1] * x.ndim).expand(_out(equation).shape).clone()
    y[tuple(slice(low, low + size) for (low, _, _), size in zip(config, x.shape, strict=True))] = x
    return y


def _reduce(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def run(equation: core.JaxprEqn, x: torch.Tensor, *_: Any) -> torch.Tensor:
        axes = tuple(int(axis) for axis in equation.params["axes"])
        return function(x, dim=axes) if axes else x

    return run


def _sum(x: torch.Tensor, dim: tuple[int, ...]) -> torch.Tensor:
    return x.sum(dim=dim, dtype=x.dtype)


def _all(x: torch.Tensor, dim: tuple[int, ...]) -> torch.Tensor:
    for axis in sorted(dim, reverse=True):
        x = x.all(dim=axis)
    return x


def _sort(equation: core.JaxprEqn, *xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if equation.params["num_keys"] != 1:
        raise NotImplementedError("a sort by several keys is not known to the torch evaluator of layouts")
    axis = equation.params["dimension"]
    order = torch.sort(xs[0], dim=axis, stable=True).indices
    return tuple(torch.gather(x, axis, order) for x in xs)


def _select(equation: core.JaxprEqn, which: torch.Tensor, *cases: torch.Tensor) -> torch.Tensor:
    if len(cases) != 2:
        raise NotImplementedError("a select of other than two cases is not known to the torch evaluator of layouts")
    return torch.where(which if which.dtype == torch.bool else which != 0, cases[1], cases[0])


def _gather(equation: core.JaxprEqn, x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Single elements along one axis, whole slices of the others; a leading axis may be common to both."""
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    shared, of_indices = numbers.operand_batching_dims, numbers.start_indices_batching_dims
    axis: int = numbers.start_index_map[0] if len(numbers.start_index_map) == 1 else -1
    is_whole = all(size == x.shape[d] for d, size in enumerate(sizes) if d != axis and d not in shared)
    known = axis >= 0 and numbers.collapsed_slice_dims == (axis,) and is_whole and len(shared) <= 1
    if not known or (shared and of_indices != (0,)):
        raise NotImplementedError(f"gather {numbers} is not known to the torch evaluator of layouts")
    places = indices[..., 0].to(torch.int64)
    aval = _out(equation)
    if not shared:
        taken = x.movedim(axis, 0)[places]  # the axes of indices, then the others of x in their order
        count = places.ndim
    else:
        moved = x.movedim((shared[0], axis), (0, 1))
        steps = torch.arange(x.shape[shared[0]], device=x.device).reshape(-1, *[1] * (places.ndim - 1))
        taken, count = moved[steps, places], places.ndim
    batch = [d for d in range(len(aval.shape)) if d not in numbers.offset_dims]
    return taken.movedim(tuple(range(count + taken.ndim - count)), (*batch, *numbers.offset_dims))


def _plain(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda equation, *found: function(*found)


def _integer_pow(equation: core.JaxprEqn, x: torch.Tensor) -> torch.Tensor:
    return x ** equation.params["y"]


def _reshape(equation: core.JaxprEqn, x: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.reshape(_out(equation).shape)


def _transpose(equation: core.JaxprEqn, x: torch.Tensor) -> torch.Tensor:
    return x.permute(equation.params["permutation"])


def _round(equation: core.JaxprEqn, x: torch.Tensor) -> torch.Tensor:
    if int(equation.params["rounding_method"]) != int(jax.lax.RoundingMethod.TO_NEAREST_EVEN):
        raise NotImplementedError("rounding away from zero is not known to the torch evaluator of layouts")
    return torch.round(x)


def _reduce_precision(equation: core.JaxprEqn, x: torch.Tensor) -> torch.Tensor:
    bits = equation.params["exponent_bits"], equation.params["mantissa_bits"]
    held = {(8, 23): torch.float32, (8, 7): torch.bfloat16, (5, 10): torch.float16}.get(bits)
    if held is None:
        raise NotImplementedError(f"rounding to {bits} bits is not known to the torch evaluator of layouts")
    return x.to(held).to(x.dtype)


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "abs": _plain(torch.abs),
    "add": _plain(torch.add),
    "and": _plain(torch.bitwise_and),
    "bitcast_convert_type": _bitcast,
    "broadcast_in_dim": _broadcast,
    "clamp": _plain(lambda low, x, high: torch.minimum(torch.maximum(x, low), high)),
    "concatenate": _concatenate,
    "convert_element_type": _convert,
    "copy": _plain(lambda x: x),
    "div": _plain(torch.div),
    "eq": _plain(torch.eq),
    "gather": _gather,
    "ge": _plain(torch.ge),
    "gt": _plain(torch.gt),
    "integer_pow": _integer_pow,
    "iota": _iota,
    "is_finite": _plain(torch.isfinite),
    "le": _plain(torch.le),
    "lt": _plain(torch.lt),
    "max": _plain(torch.maximum),
    "min": _plain(torch.minimum),
    "mul": _plain(torch.mul),
    "ne": _plain(torch.ne),
    "neg": _plain(torch.neg),
    "not": _plain(torch.bitwise_not),
    "or": _plain(torch.bitwise_or),
    "pad": _pad,
    "pow": _plain(torch.pow),
    "reduce_and": _reduce(_all),
    "reduce_max": _reduce(torch.amax),
    "reduce_min": _reduce(torch.amin),
    "reduce_precision": _reduce_precision,
    "reduce_sum": _reduce(_sum),
    "reshape": _reshape,
    "round": _round,
    "select_n": _select,
    "shift_left": _plain(operator.lshift),
    "shift_right_arithmetic": _plain(operator.rshift),
    "shift_right_logical": _shift_right_logical,
    "sign": _plain(torch.sign),
    "slice": _slice,
    "sort": _sort,
    "squeeze": _reshape,
    "stack": _stack,
    "stop_gradient": _plain(lambda x: x),
    "sub": _plain(torch.sub),
    "transpose": _transpose,
    "xor": _plain(torch.bitwise_xor),
}


def struct_of(tensor: torch.Tensor) -> jax.ShapeDtypeStruct:
    """What a trace sees of a tensor."""
    return jax.ShapeDtypeStruct(tuple(tensor.shape), numpy_dtype(tensor.dtype))
