"""Householder factorisations in LAPACK's packed forms, batched. Reflectors are H = I - tau v vᴴ with v[0] = 1."""

from __future__ import annotations

from flagos_backend.devices import tensor_float
from flagos_backend.process.torch_loading import Tensor, torch


def reflector(column: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For columns [b, m], m >= 1: (v [b, m], tau [b], beta [b], real) with Hᴴ column = beta e0. LAPACK's larfg."""
    alpha, rest = column[:, 0], column[:, 1:]
    norm = torch.linalg.vector_norm(column, dim=1)
    real = alpha.real if alpha.is_complex() else alpha
    untouched = (rest == 0).all(dim=1)
    if alpha.is_complex():
        untouched &= alpha.imag == 0
    beta = torch.where(untouched, real, -torch.copysign(norm, real))
    divisor = torch.where(untouched, 1, beta).to(column.dtype)
    tau = torch.where(untouched, 0, (divisor - alpha) / divisor)
    scale = torch.where(untouched, 1, alpha - divisor)
    v = torch.cat((torch.ones_like(alpha).unsqueeze(1), rest / scale.unsqueeze(1)), dim=1)
    return v, tau, beta


def _product(a: Tensor, b: Tensor) -> Tensor:
    with tensor_float.relied_on():
        return torch.matmul(a, b)


def _left(block: Tensor, v: Tensor, tau: Tensor) -> Tensor:
    """(I - tau v vᴴ) block."""
    return block - (tau[:, None] * v).unsqueeze(2) * _product(v.conj().unsqueeze(1), block)


def _right(block: Tensor, v: Tensor, tau: Tensor) -> Tensor:
    """block (I - tau v vᴴ)."""
    return block - _product(block, v.unsqueeze(2)) * (tau[:, None] * v.conj()).unsqueeze(1)


def hessenberg(a: Tensor) -> tuple[Tensor, Tensor]:
    """a [..., n, n] -> (H with the reflectors below its subdiagonal, taus [..., n-1]): LAPACK's gehrd."""
    n = a.shape[-1]
    h = a.reshape(-1, n, n).clone()
    taus = h.new_zeros((len(h), max(n - 1, 0)))
    for i in range(n - 1):
        v, tau, beta = reflector(h[:, i + 1 :, i])
        h[:, :, i + 1 :] = _right(h[:, :, i + 1 :], v, tau)
        h[:, i + 1 :, i + 1 :] = _left(h[:, i + 1 :, i + 1 :], v, tau.conj())
        h[:, i + 1, i] = beta.to(h.dtype)
        h[:, i + 2 :, i] = v[:, 1:]
        taus[:, i] = tau
    return h.reshape(a.shape), taus.reshape(*a.shape[:-2], -1)


def tridiagonal(a: Tensor, lower: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """a [..., n, n], Hermitian by the triangle named -> (packed a, d [..., n], e [..., n-1], taus [..., n-1]).

    LAPACK's sytrd and hetrd. The other triangle comes back as it was.
    """
    n = a.shape[-1]
    flat = a.reshape(-1, n, n)
    triangle = flat.tril(-1) if lower else flat.triu(1)
    diagonal = flat.diagonal(dim1=-2, dim2=-1)
    work = triangle + triangle.mH + torch.diag_embed((diagonal.real if a.is_complex() else diagonal).to(a.dtype))
    packed = flat.clone()
    d = (diagonal.real if a.is_complex() else diagonal).clone()
    e = d.new_zeros((len(flat), n - 1))
    taus = flat.new_zeros((len(flat), n - 1))
    for step in range(n - 1):
        if lower:
            i, block, at, kept = step, slice(step + 1, n), step + 1, slice(step + 2, n)
            v, tau, beta = reflector(work[:, block, i])
        else:
            i = n - 1 - step  # the column that is brought to tridiagonal form
            block, at, kept = slice(0, i), i - 1, slice(0, i - 1)
            turned, tau, beta = reflector(work[:, block, i].flip(1))
            v = turned.flip(1)
        inner = _right(_left(work[:, block, block], v, tau.conj()), v, tau)
        work[:, block, block] = inner
        packed[:, at, i] = beta.to(a.dtype)
        packed[:, kept, i] = v[:, 1:] if lower else v[:, :-1]
        position = i if lower else i - 1
        e[:, position] = beta
        taus[:, position] = tau
    final = work.diagonal(dim1=-2, dim2=-1)
    d = (final.real if a.is_complex() else final).clone()
    packed.diagonal(dim1=-2, dim2=-1).copy_(d)
    batch = a.shape[:-2]
    return packed.reshape(a.shape), d.reshape(*batch, n), e.reshape(*batch, n - 1), taus.reshape(*batch, n - 1)


def _fixed_first(jpvt: Tensor) -> tuple[Tensor, Tensor]:
    """The column order that puts columns marked nonzero in front, and how many each matrix has."""
    marked = jpvt != 0
    order = (~marked).to(torch.uint8).sort(dim=-1, stable=True).indices
    return order, marked.sum(dim=-1)


def pivoted_qr(a: Tensor, jpvt: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """a [..., m, n], jpvt [..., n] -> (packed a, 1-based column order, taus): LAPACK's geqp3.

    At each step the column of greatest remaining norm is taken; columns marked by a nonzero jpvt go first, unpivoted.
    """
    m, n = a.shape[-2:]
    count = min(m, n)
    work = a.reshape(-1, m, n).clone()
    order, fixed = _fixed_first(jpvt.reshape(-1, n))
    work = work.gather(2, order.unsqueeze(1).expand_as(work))
    taus = work.new_zeros((len(work), count))
    rows = torch.arange(len(work), device=work.device)
    for i in range(count):
        norms = torch.linalg.vector_norm(work[:, i:, i:], dim=1)
        best = torch.where(i < fixed, i, norms.argmax(dim=1) + i)
        chosen, chosen_order = work[rows, :, best], order[rows, best]
        work[rows, :, best], order[rows, best] = work[:, :, i].clone(), order[:, i].clone()
        work[:, :, i], order[:, i] = chosen, chosen_order
        v, tau, beta = reflector(work[:, i:, i])
        work[:, i:, i + 1 :] = _left(work[:, i:, i + 1 :], v, tau.conj())
        work[:, i, i] = beta.to(work.dtype)
        work[:, i + 1 :, i] = v[:, 1:]
        taus[:, i] = tau
    return work.reshape(a.shape), (order + 1).to(jpvt.dtype).reshape(jpvt.shape), taus.reshape(*a.shape[:-2], count)
