"""--compile onednn: products of matrices by oneDNN in a compiled graph, where it is faster.

torch multiplies with MKL, which does not use AVX-512 on AMD's processors. oneDNN does, and comes
with torch. The results are equal but for rounding.
"""

import torch
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

LARGE = 4_000_000  # multiplications in a product, from which on oneDNN's is faster on two threads


@torch.library.custom_op("crane::product", mutates_args=())
def product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """A B + bias: (rows, inner), (inner, columns), (columns,) -> (rows, columns)."""
    return torch.ops.mkldnn._linear_pointwise(a, b.t(), bias, "none", [], "")


@product.register_fake
def _(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return a.new_empty(len(a), b.shape[1])


class OneDNN(CustomGraphPass):
    """A pass of the compiler over a graph: large products become `product`."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        for node in graph.nodes:
            if node.target in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
                *bias, a, b = node.args
                (rows, inner), columns = a.meta["val"].shape, b.meta["val"].shape[1]
                plain = not node.kwargs and all(x.meta["val"].dim() == 1 for x in bias)
                plain &= a.meta["val"].dtype == torch.float32
                if plain and rows * inner * columns >= LARGE:
                    node.target = torch.ops.crane.product.default
                    node.args = a, b, *(bias or [None])

    def uuid(self) -> bytes:  # the compiler's cache knows graphs by it
        return get_hash_for_files((__file__,))
