"""`acl.blas.*`: products of matrices and vectors, as the single operator GEMM.

C = alpha * A B + beta * C, all of it in device memory. Source of the checks: `acl_cblas` of CANN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from npuserve.testing.simulator.binding import entry
from npuserve.testing.simulator.core import DataBuffer, TensorDesc
from npuserve.testing.simulator.faults import RefusedError
from npuserve.testing.simulator.op_run import OpCall, execute_operator, find_operator, make_handle

if TYPE_CHECKING:
    from npuserve.testing.simulator.runtime import Runtime

_INVALID_PARAM = 100000
_FORMAT_ND = 2
_PLAIN, _TRANSPOSED, _FRACTAL = range(3)
_HIGH_PRECISION = 0
_FLOAT16, _INT8, _INT32 = 1, 2, 3


@dataclass(frozen=True)
class Product:
    """C of [m, n] = A of [m, k] times B of [k, n]; a side marked transposed lies the other way."""

    trans_a: int
    trans_b: int
    trans_c: int
    m: int
    n: int
    k: int
    type_a: int
    type_b: int
    type_c: int
    precision: int

    def find(self, runtime: Runtime) -> OpCall:
        """The loaded GEMM for it."""
        if min(self.m, self.n, self.k) <= 0:
            raise RefusedError(_INVALID_PARAM, f"m, n, k must be positive: {self}")
        if not {self.trans_a, self.trans_b} <= {_PLAIN, _TRANSPOSED, _FRACTAL}:
            raise RefusedError(_INVALID_PARAM, f"a transposition is unknown: {self}")
        if self.trans_c not in (_PLAIN, _FRACTAL):
            raise RefusedError(_INVALID_PARAM, f"C cannot be transposed: {self}")
        if _FRACTAL in (self.trans_a, self.trans_b, self.trans_c):
            raise RefusedError(200001, "fractal matrices are not simulated")
        if self.precision != _HIGH_PRECISION:
            raise RefusedError(_INVALID_PARAM, f"only high precision is there: {self}")
        a, b = [self.m, self.k], [self.k, self.n]
        left = TensorDesc(self.type_a, a[::-1] if self.trans_a else a, _FORMAT_ND)
        right = TensorDesc(self.type_b, b[::-1] if self.trans_b else b, _FORMAT_ND)
        result = TensorDesc(self.type_c, [self.m, self.n], _FORMAT_ND)
        factor = TensorDesc(self.type_c, [], _FORMAT_ND)
        attributes = {
            "transpose_a": self.trans_a == _TRANSPOSED, "transpose_b": self.trans_b == _TRANSPOSED,
        }  # fmt: skip
        inputs = (left, right, result, factor, factor)
        return find_operator(runtime, "GEMM", inputs, (result,), attributes)

    def execute(
        self, runtime: Runtime, alpha: int, a: int, b: int, beta: int, c: int,
        leading: tuple[int, ...], stream: int,
    ) -> None:  # fmt: skip
        """Queue it; addresses in device memory."""
        if 0 in (alpha, a, b, beta, c):
            raise RefusedError(_INVALID_PARAM, "an address is null")
        call = self.find(runtime)
        if set(leading) != {-1}:
            raise RefusedError(_INVALID_PARAM, f"leading dimensions must be -1, not {leading}")
        blocks = [
            DataBuffer(address, desc.size)
            for address, desc in zip((a, b, c, alpha, beta), call.inputs, strict=True)
        ]
        execute_operator(runtime, call, blocks, [blocks[2]], stream)


@entry("acl.blas.gemm_ex", "iiiiiikkiikiikkiiik")
def gemm_ex(
    runtime: Runtime, trans_a: int, trans_b: int, trans_c: int, m: int, n: int, k: int,
    alpha: int, a: int, lda: int, type_a: int, b: int, ldb: int, type_b: int, beta: int, c: int,
    ldc: int, type_c: int, precision: int, stream: int,
) -> None:  # fmt: skip
    """Queue a product of matrices."""
    product = Product(trans_a, trans_b, trans_c, m, n, k, type_a, type_b, type_c, precision)
    product.execute(runtime, alpha, a, b, beta, c, (lda, ldb, ldc), stream)


@entry("acl.blas.create_handle_for_gemm_ex", "iiiiiiiiii", failure=(0,))
def create_handle_for_gemm_ex(runtime: Runtime, *numbers: int) -> int:
    """Look a product of matrices up."""
    call = Product(*numbers).find(runtime)
    return make_handle(runtime, call, "acl.blas.create_handle_for_gemm_ex")


@entry("acl.blas.gemv_ex", "iiikkiikiikkiiik")
def gemv_ex(
    runtime: Runtime, trans_a: int, m: int, n: int, alpha: int, a: int, lda: int, type_a: int,
    x: int, incx: int, type_x: int, beta: int, y: int, incy: int, type_y: int, precision: int,
    stream: int,
) -> None:  # fmt: skip
    """Queue a product of a matrix [m, n] and a vector."""
    product = Product(trans_a, _PLAIN, _PLAIN, m, 1, n, type_a, type_x, type_y, precision)
    # The binding passes incy for both.
    product.execute(runtime, alpha, a, x, beta, y, (lda, incy), stream)


@entry("acl.blas.create_handle_for_gemv_ex", "iiiiiii", failure=(0,))
def create_handle_for_gemv_ex(
    runtime: Runtime, trans_a: int, m: int, n: int, type_a: int, type_x: int, type_y: int,
    precision: int,
) -> int:  # fmt: skip
    """Look a product of a matrix and a vector up."""
    product = Product(trans_a, _PLAIN, _PLAIN, m, 1, n, type_a, type_x, type_y, precision)
    return make_handle(runtime, product.find(runtime), "acl.blas.create_handle_for_gemv_ex")


def _register_fixed(letter: str, types: tuple[int, int, int]) -> None:
    """The calls whose datatypes are part of the name: h (FP16), s8 (INT8 to INT32)."""

    def gemm(
        runtime: Runtime, trans_a: int, trans_b: int, trans_c: int, m: int, n: int, k: int,
        alpha: int, a: int, lda: int, b: int, ldb: int, beta: int, c: int, ldc: int,
        precision: int, stream: int,
    ) -> None:  # fmt: skip
        product = Product(trans_a, trans_b, trans_c, m, n, k, *types, precision)
        product.execute(runtime, alpha, a, b, beta, c, (lda, ldb, ldc), stream)

    def gemv(
        runtime: Runtime, trans_a: int, m: int, n: int, alpha: int, a: int, lda: int, x: int,
        incx: int, beta: int, y: int, incy: int, precision: int, stream: int,
    ) -> None:  # fmt: skip
        product = Product(trans_a, _PLAIN, _PLAIN, m, 1, n, *types, precision)
        product.execute(runtime, alpha, a, x, beta, y, (lda, incx, incy), stream)

    def gemm_handle(
        runtime: Runtime, trans_a: int, trans_b: int, trans_c: int, m: int, n: int, k: int,
        precision: int,
    ) -> int:  # fmt: skip
        product = Product(trans_a, trans_b, trans_c, m, n, k, *types, precision)
        name = f"acl.blas.create_handle_for_{letter}gemm"
        return make_handle(runtime, product.find(runtime), name)

    def gemv_handle(runtime: Runtime, trans_a: int, m: int, n: int, precision: int) -> int:
        product = Product(trans_a, _PLAIN, _PLAIN, m, 1, n, *types, precision)
        name = f"acl.blas.create_handle_for_{letter}gemv"
        return make_handle(runtime, product.find(runtime), name)

    calls: list[tuple[str, str, Callable[..., Any], tuple[Any, ...]]] = [
        (f"{letter}gemm", "iiiiiikkikikkiik", gemm, ()),
        (f"{letter}gemv", "iiikkikikkiik", gemv, ()),
        (f"create_handle_for_{letter}gemm", "iiiiiii", gemm_handle, (0,)),
        (f"create_handle_for_{letter}gemv", "iiii", gemv_handle, (0,)),
    ]
    for name, formats, function, failure in calls:
        entry(f"acl.blas.{name}", formats, failure=failure)(function)


_register_fixed("h", (_FLOAT16, _FLOAT16, _FLOAT16))
_register_fixed("s8", (_INT8, _INT8, _INT32))
