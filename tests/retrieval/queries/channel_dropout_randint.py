import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


# Un canal entier (une image H x W) est garde ou jete, d'apres un tirage par canal.
@triton.jit
def noyau_canaux(entree, sortie, graine, seuil, echelle, HW, TAILLE: tl.constexpr):
    canal = tl.program_id(0)
    tirage = tl.randint(graine, canal).to(tl.uint32)
    garde = (tirage >= seuil.to(tl.uint32)).to(tl.float32) * echelle
    for debut in range(0, HW, TAILLE):
        k = debut + tl.arange(0, TAILLE)
        v = tl.load(entree + canal * HW + k, mask=k < HW, other=0.0)
        tl.store(sortie + canal * HW + k, v * garde, mask=k < HW)


@autodiff(inputs_require_grad=(0,))
def dropout2d(image, p=0.25, graine=1):
    n, c, h, w = image.shape
    sortie = torch.empty_like(image)
    noyau_canaux[(n * c,)](image, sortie, graine, int(p * 2**32), 1.0 / (1.0 - p), h * w, TAILLE=512)
    return sortie
