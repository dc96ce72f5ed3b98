"""--compile onednn: products of matrices by oneDNN in a compiled graph, where it is faster.

torch multiplies with MKL, which does not use AVX-512 on AMD's processors. oneDNN does, and comes
with torch. The results are equal but for rounding.
"""

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.ir import TensorBox
from torch._inductor.lowering import add, cat, permute, select, unsqueeze
from torch._inductor.mkldnn_ir import LinearUnary

ATEN = torch.ops.aten
PRODUCTS = ATEN.mm.default, ATEN.addmm.default, ATEN.bmm.default, ATEN.baddbmm.default
LARGE = 4_000_000  # multiplications in a product, from which on oneDNN's is faster on two threads


def product(a: TensorBox, b: TensorBox, bias: TensorBox | None) -> TensorBox:
    """A B + bias in the compiler's code; those of a stack, as an ensemble has, one by one."""
    if len(a.get_size()) == 2:
        return TensorBox.create(LinearUnary.create(a, permute(b, [1, 0]), bias, "none", [], ""))
    pairs = ((select(a, 0, i), select(b, 0, i)) for i in range(a.get_size()[0]))
    stack = cat([unsqueeze(product(*pair, None), 0) for pair in pairs])
    return stack if bias is None else add(stack, bias)


product._inductor_lowering_function = True  # so the compiler calls it when it comes to its node


class OneDNN(CustomGraphPass):
    """A pass of the compiler over a graph: large products become `product`."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        for node in graph.nodes:
            if node.target in PRODUCTS:
                *bias, a, b = node.args
                multiplications = a.meta["val"].shape[-2:].numel() * b.meta["val"].shape[-1]
                plain = not node.kwargs and a.meta["val"].dtype == torch.float32
                fits = all(x.meta["val"].shape == b.meta["val"].shape[1:] for x in bias)
                plain &= fits or a.meta["val"].dim() == 3
                if plain and multiplications >= LARGE:
                    node.target, node.args = product, (a, b, *(bias or [None]))

    def uuid(self) -> bytes:  # the compiler's cache knows graphs by it
        return get_hash_for_files((__file__,))
