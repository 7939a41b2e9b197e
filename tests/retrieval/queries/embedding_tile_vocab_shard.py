import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def busca(
    indices, tabela, saida, n_tokens, dim: tl.constexpr, inicio, fim, BT: tl.constexpr, BD: tl.constexpr
):
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    ativo = t < n_tokens
    linha = tl.load(indices + t, mask=ativo, other=-1)
    # so as linhas desta particao do vocabulario
    local = ativo & (linha >= inicio) & (linha < fim)
    v = tl.load(
        tabela + (linha - inicio)[:, None] * dim + d[None, :],
        mask=local[:, None] & (d < dim)[None, :],
        other=0.0,
    )
    tl.store(saida + t[:, None] * dim + d[None, :], v, mask=ativo[:, None] & (d < dim)[None, :])


@autodiff(inputs_require_grad=(1,))
def embedding_paralelo(indices, tabela, inicio=0):
    n, dim = indices.numel(), tabela.shape[1]
    saida = tabela.new_empty(n, dim)
    busca[(triton.cdiv(n, 16), triton.cdiv(dim, 128))](
        indices, tabela, saida, n, dim, inicio, inicio + tabela.shape[0], BT=16, BD=128
    )
    return saida
