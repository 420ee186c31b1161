"""``Backend``: what one way to run the experts offers. Everything outside this package knows backends through it.

How to add one:

1. A folder here with a class derived from ``Backend``. ``name``, ``refusal``, ``describe`` and ``run`` make a backend;
   ``reference`` has no more.
2. One line in ``BACKENDS`` of ``_choice.py``, at the place where it is to be tried; ``is_default`` says on which
   platforms that happens unasked.
3. Weights in a layout of its own: ``reads``, ``layout_refusal``, ``kernel_layout``, its inverse ``plain_layout``, and
   ``shard_axis`` for layers over a mesh.
4. A router, or the whole layer in one: ``routing_refusal`` and ``route``; ``layer_refusal`` and ``run_layer``.
5. Matrices outside the experts: ``matrix_refusal`` and ``multiply``; ``matrix_layout`` for a layout of its own.
6. Rows that another device stored into this one's memory: ``serves_arrived``, ``arriving_quantization`` and
   ``serve_arrived``.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax.numpy as jnp
from jax.typing import DTypeLike

from moe_jax._config import MoEConfig
from moe_jax._typing import Array, Size
from moe_jax.quantization import ExpertWeights, QuantizedMatrix, QuantizedTensor
from moe_jax.routing import Routing, RoutingParams
from pallas_kernels.combine import RoutedRows
from pallas_kernels.common import WeightLayout
from pallas_kernels.nvlink_dispatch import DispatchedRows
from pallas_kernels.tuning.layer import AnyKey

# Of a product outside the experts: of one matrix, or of several whose products stand side by side.
Matrices = QuantizedMatrix | tuple[QuantizedMatrix, ...]
Biases = Array | tuple[Array, ...] | None
# (x (T, H), router_logits (T, E) or their partial sums (P, T, E), weights, routing params, token_mask (T,), output of
# shared experts (T, H))
LayerArguments = tuple[Array, Array, ExpertWeights, RoutingParams | None, Array | None, Array | None]


def whole_logits(logits: Array) -> Array:
    """Router logits (T, E), which may be the sum of (P, T, E)."""
    return logits if logits.ndim == 2 else logits.sum(axis=0)


@dataclasses.dataclass(frozen=True)
class Problem:
    """What the choice depends on. weights: arrays or ShapeDtypeStructs. platform: "cpu" or "gpu"."""

    config: MoEConfig
    weights: ExpertWeights
    num_tokens: Size
    platform: str


@dataclasses.dataclass(frozen=True)
class MatrixProblem:
    """A product with a quantized matrix outside the experts: x (T, K) and y (T, N).

    matrix: arrays or ShapeDtypeStructs; a tuple of matrices only for backends with ``joins_matrices``.
    dtype, out_dtype: of x and y. platform: "cpu" or "gpu".
    """

    matrix: Matrices
    num_tokens: Size
    dtype: DTypeLike
    out_dtype: DTypeLike
    has_bias: bool
    platform: str


class Backend(abc.ABC):
    """One way to run the experts of a layer. Instances hold no state.

    name: by which users ask for it and ``explain`` calls it.
    takes_adapters: whether ``run`` adds the low-rank addends of ``ExpertWeights``; else it is not given any.
    plans_for_local_experts: whether tiles are chosen for the experts in ``weights``; else for ``config.num_experts``,
        which inside ``jax.shard_map`` counts those of all devices.
    serves_arrived: whether ``serve_arrived`` runs.
    joins_matrices: whether ``multiply`` takes several matrices.
    leaves_rows: whether ``run_layer`` takes ``is_combined=False``.
    is_all_kernels: whether ``run`` and ``run_layer`` are launches of kernels from end to end, which runtimes other than
        JAX's can launch as well.
    """

    name: ClassVar[str]
    takes_adapters: ClassVar[bool] = False
    plans_for_local_experts: ClassVar[bool] = False
    serves_arrived: ClassVar[bool] = False
    joins_matrices: ClassVar[bool] = False
    leaves_rows: ClassVar[bool] = False
    is_all_kernels: ClassVar[bool] = False

    def is_default(self, platform: str) -> bool:
        """Whether layers that name no implementation try it on this platform."""
        return False

    def device_refusal(self) -> str | None:
        """Why it runs nothing on this process's devices, or None."""
        return None

    @abc.abstractmethod
    def refusal(self, problem: Problem) -> str | None:
        """Why it cannot run a problem whose weights it ``reads``, or None."""

    @abc.abstractmethod
    def describe(self, problem: Problem) -> list[str]:
        """How it would run the problem, one line each."""

    def in_brief(self, problem: Problem) -> str:
        """The same in a few words."""
        return self.describe(problem)[-1]

    @abc.abstractmethod
    def run(
        self,
        x: Array,
        topk_weights: Array,
        topk_ids: Array,
        weights: ExpertWeights,
        config: MoEConfig,
        out_dtype: DTypeLike = jnp.float32,
    ) -> Array:
        """The sum over experts, (T, H), rounded once to ``out_dtype``.

        Args:
            x: (T, H) float; zeros for a token without any expert.
            topk_weights: (T, k) float32; 0 where the id is -1.
            topk_ids: (T, k) int32, indices into the first axis of the weights, or -1.
            weights: in a layout that it ``reads``.

        Raises:
            NotImplementedError: means the same as a reason from ``refusal``.
        """

    def gradient_refusal(self, problem: Problem) -> str | None:
        """Why ``run`` cannot be differentiated, or None. The other methods never are."""
        return None

    def describe_kept(self, problem: Problem) -> str | None:
        """What ``run`` keeps for its gradient where ``MoEConfig.keep_hidden`` asks for rows, in words; None where it
        keeps its arguments alone.
        """
        return None

    # -- a layout of its own ------------------------------------------------------------------------------------------

    def reads(self, layout: WeightLayout) -> bool:
        """Whether ``run`` takes weights in this layout."""
        return layout.is_plain

    def layout_refusal(self, weights: ExpertWeights, config: MoEConfig) -> str | None:
        """Why plain weights have no layout of this backend's own, or None where ``kernel_layout`` makes one."""
        return f"{self.name} reads weights as they are stored"

    def kernel_layout(self, weights: ExpertWeights, config: MoEConfig) -> ExpertWeights:
        """The same weights as ``run`` reads them fastest. Exact. Raises NotImplementedError for ``layout_refusal``."""
        return weights

    def plain_layout(self, weights: ExpertWeights) -> ExpertWeights:
        """Inverse of ``kernel_layout``; weights in other layouts are returned as they are."""
        return weights

    def shard_axis(self, tensor: QuantizedTensor, field: str, is_w2: bool) -> int | None:
        """The axis of a leaf of ``kernel_layout`` that counts outputs (w13) or inputs (w2) I; None: it has none."""
        raise NotImplementedError(f"{self.name} has no layout of its own")

    def intermediate_unit(self, config: MoEConfig) -> int:
        """Each device's part of I must be a multiple of this, where weights stay in layout "plain"."""
        return 1

    def tuning_key(self, config: MoEConfig) -> AnyKey:
        """What the tables of ``pallas_kernels.tuning`` know a layer by.

        Raises NotImplementedError with the reason where there is nothing to measure.
        """
        raise NotImplementedError(f"{self.name} has no configurations to measure")

    def tuning_refusal(self, config: MoEConfig, num_tokens: int) -> str | None:
        """Why a call of so many tokens takes nothing from those tables, or None. config: one that has a tuning_key."""
        return None

    # -- routing and the whole layer ----------------------------------------------------------------------------------

    def routing_refusal(
        self, config: MoEConfig, weights: ExpertWeights, params: RoutingParams | None, *, has_mask: bool
    ) -> str | None:
        """Why ``route`` cannot run, or None: what this backend's router lacks."""
        return "router"

    def route(
        self, config: MoEConfig, router_logits: Array, params: RoutingParams | None, token_mask: Array | None
    ) -> Routing:
        """``moe_jax.routing.route`` by this backend, for calls without a ``routing_refusal``."""
        raise NotImplementedError(f"{self.name} has no router")

    def layer_refusal(self, config: MoEConfig, arguments: LayerArguments) -> str | None:
        """Why ``run_layer`` cannot run these arguments although ``refusal`` has no reason; or None."""
        return f"{self.name} leaves routing to others"

    def run_layer(
        self,
        config: MoEConfig,
        x: Array,
        router_logits: Array,
        weights: ExpertWeights,
        params: RoutingParams | None,
        token_mask: Array | None,
        shared: Array | None,
        is_combined: bool = True,
    ) -> tuple[Array | RoutedRows, Array, Array]:
        """Routing, experts, shared output and the one rounding in one, for calls without a ``layer_refusal``.

        Returns (y (T, H) in x's dtype, topk_ids (T, k), rows per expert (E,)); where not is_combined, which backends
        with ``leaves_rows`` take, what y is the sum of in its place, unless the last product adds it up.
        """
        raise NotImplementedError(f"{self.name} leaves routing to others")

    # -- matrices outside the experts ---------------------------------------------------------------------------------

    def matrix_refusal(self, problem: MatrixProblem) -> str | None:
        """Why ``multiply`` cannot run, or None."""
        return f"{self.name} multiplies with experts alone"

    def multiply(self, x: Array, matrix: Matrices, bias: Biases, out_dtype: DTypeLike) -> Array:
        """x W^T + b with x quantized as the scheme says, summed in float32 and rounded once to ``out_dtype``.

        Args:
            x: (T, K) float.
            matrix: (N, K), in a layout that the backend ``reads``; or, with ``joins_matrices``, a tuple of such ones.
            bias: (N,) or None; of a tuple of matrices a tuple or None.

        Returns (R, N), R >= T: rows past T mean nothing. Raises NotImplementedError with a reason that
        ``matrix_refusal`` did not know.
        """
        raise NotImplementedError(f"{self.name} multiplies with experts alone")

    def matrix_parts(self, problem: MatrixProblem) -> int:
        """Parts of K whose products are best left apart, so that all SMs read the matrix; 1 where ``multiply`` is as
        fast. Of a problem without a ``matrix_refusal``."""
        return 1

    def multiply_in_parts(self, x: Array, matrix: Matrices, parts: int) -> Array:
        """``multiply`` in so many partial sums in float32, (parts * R, N), one after the other."""
        raise NotImplementedError(f"{self.name} leaves no partial sums")

    def matrix_rows(self, problem: MatrixProblem, parts: int = 1) -> tuple[str, int] | None:
        """How ``multiply_rows`` takes rows of a problem without a ``matrix_refusal``: the kind of
        ``quantize_and_permute``, and how many rows their scales have room for. None where it takes none."""
        return None

    def multiply_rows(
        self,
        codes: Array,
        scales: Array,
        num_tokens: int,
        matrix: Matrices,
        bias: Biases,
        out_dtype: DTypeLike,
        parts: int = 1,
    ) -> Array:
        """``multiply`` of rows that were quantized as ``matrix_rows`` says; with parts ``multiply_in_parts``."""
        raise NotImplementedError(f"{self.name} quantizes rows itself")

    def matrix_layout(self, matrix: QuantizedMatrix, dtype: DTypeLike) -> QuantizedMatrix:
        """A plain matrix as ``multiply`` reads it fastest in layers that compute in ``dtype``. Exact."""
        return matrix

    def plain_matrix(self, matrix: QuantizedMatrix) -> QuantizedMatrix:
        """Inverse of ``matrix_layout``."""
        return matrix

    # -- a share of a layer over a mesh -------------------------------------------------------------------------------

    def row_dtype(self, config: MoEConfig) -> DTypeLike:
        """What holds the output of one expert for one row, before it is weighted."""
        return jnp.float32

    def arriving_quantization(self, weights: ExpertWeights) -> str:
        """How tokens are quantized before they travel to the experts of another device: a kind of ``dispatch_rows``."""
        return "none"

    def serve_arrived(
        self,
        config: MoEConfig,
        arrived: DispatchedRows,
        first_slot: Array,
        weights: ExpertWeights,
        send_back: Callable[[Array, Array], Array],
    ) -> Array:
        """The experts of this device, slots from ``first_slot`` () int32 on, for tokens that came from several devices.

        arrived: quantized as ``arriving_quantization`` says. send_back: ``(rows (Mp, H), row_of (N, k)) -> (T, H)``,
        done in place of the sum over k.
        """
        raise NotImplementedError(f"{self.name} serves no rows of other devices")
