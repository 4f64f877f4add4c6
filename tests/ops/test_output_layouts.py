"""The layout of an output is that of torch.empty_like, whatever the input's is."""

from __future__ import annotations

import random

import torch

import fusedtrain
import fusedtrain.functional as F


def any_layout(choose: random.Random) -> torch.Tensor:
    """A tensor that is sliced, permuted, expanded, or has dimensions of one element."""
    dims = choose.randint(1, 5)
    t = torch.randn([choose.choice((1, 1, 2, 3, 4)) for _ in range(dims)])
    for _ in range(choose.randint(0, 3)):
        d = choose.randrange(dims)
        kind = choose.choice(("slice", "permute", "expand", "narrow", "stride"))
        if kind == "slice" and t.size(d) > 1:
            t = t.narrow(d, 1, t.size(d) - 1)
        elif kind == "permute":
            t = t.permute(choose.sample(range(dims), dims))
        elif kind == "expand" and t.size(d) == 1:
            t = t.expand([3 if i == d else -1 for i in range(dims)])
        elif kind == "narrow":
            t = torch.cat([t, t], d).narrow(d, 0, t.size(d))
        elif kind == "stride":
            t = torch.cat([t, t], d)[(slice(None),) * d + (slice(None, None, 2),)]
    return t


def test_outputs_have_the_strides_of_empty_like() -> None:
    choose = random.Random(0)
    kernels = fusedtrain.backend_info().backends["cpu"].loaded
    dense = 0
    for _ in range(3000):
        x = any_layout(choose)
        want = torch.empty_like(x)
        dense += want.stride() == x.stride()
        y = F.silu(x)
        torch.testing.assert_close(y, torch.nn.functional.silu(x))
        if kernels:
            assert y.stride() == want.stride(), (x.shape, x.stride())
    assert 300 < dense < 2700
    deep = torch.randn(2, 1, 2, 1, 2, 1, 2, 1, 2, 2)[..., 0].transpose(0, 8)
    assert F.silu(deep).stride() == torch.empty_like(deep).stride()
