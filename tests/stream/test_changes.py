"""Every kind of change, alone, together and batched, is that of plain torch hooks."""

import tempfile

import pytest
import torch

import streamlens as sl
from streamlens.errors import InputError
from streamlens.stream import changes
from streamlens.stream.kept import Keep
from streamlens.stream.replay import Replay
from streamlens.stream.unembed import Unembed
from tests import hooked
from tests.models import tiny
from tests.tolerances import REPLAY

# As many prompts as heads, which a family may mistake for them, and one fewer.
IDS = torch.tensor([[5, 9, 3, 22, 41, 17, 8], [30, 7, 7, 12, 0, 0, 0], [2, 58, 33, 19, 20, 21, 0], [44, 6, 51, 52, 53, 54, 55]])
MASK = torch.arange(7) < torch.tensor([7, 4, 6, 7])[:, None]
LATER = torch.arange(7).expand(4, 7) > 1


def variants(model, n):
    """Head, write and block changes at every layer: zero, a value, some positions."""
    generator, d_model, found = torch.Generator().manual_seed(0), model.anatomy.d_model, []
    at = LATER[:n]
    for layer, facts in enumerate(model.anatomy.layers):
        value = torch.randn(n, 7, d_model, generator=generator)
        found += [(changes.block(model.anatomy, layer),), (changes.block(model.anatomy, layer, value, at),)]
        for add in facts.adds:
            found += [changes.write(layer, add), changes.write(layer, add, [value] * len(add.outputs), at)]
        for write in (w for w in facts.writes if w.n_heads):
            z = torch.randn(1, 7, write.d_head, generator=generator)
            found += [(changes.head(layer, write, 1),), (changes.head(layer, write, 3, z),)]
            found.append((changes.head(layer, write, 0, z, at), changes.head(layer, write, 2)))
    found.append((changes.block(model.anatomy, 0), *changes.write(1, model.anatomy.layers[1].adds[0])))
    return found


@pytest.mark.parametrize("n", [3, 4])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_changes_are_those_of_plain_hooks_also_batched(family, n):
    model, ids, mask = tiny.proven(family), IDS[:n], MASK[:n]
    made = variants(model, n)
    unembed = Unembed(model.module.get_submodule(model.anatomy.unembed), model.anatomy.logits)
    truth = [hooked.logits(model, change, ids, mask)[mask] for change in made]
    with Replay(model.module, model.anatomy) as replay:
        for attention in (False, True):
            replay.record(ids, mask, attention=attention)
            assert replay.enlarges == (family != "bloom")  # whose blocks also return their attention maps
            batched = torch.cat([replay.each(made[start : start + 5]) for start in range(0, len(made), 5)])
            for number, expected in reversed(list(enumerate(truth))):
                for hidden in (batched[number], replay.changed(*made[number])):
                    gap = float((unembed.logits(hidden[mask]) - expected).abs().max() / expected.abs().max())
                    assert gap <= REPLAY, (number, made[number], attention)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "olmo2", "neox"])
def test_heads_reuse_their_layers_attention(family):
    model, ran = tiny.proven(family), []
    write = next(w for w in model.anatomy.layers[1].writes if w.n_heads)
    inner = next(m for name, m in model.module.get_submodule(write.reader).named_modules() if name and name != write.leaf.split(".")[-1])
    handle = inner.register_forward_hook(lambda *_: ran.append(1))
    try:
        with Replay(model.module, model.anatomy) as replay:
            replay.record(IDS, MASK, attention=True)
            ran.clear()
            replay.each([(changes.head(1, write, h),) for h in range(write.n_heads)])
            assert not ran
            replay.changed(changes.head(1, write, 0), changes.block(model.anatomy, 0))
            assert ran
    finally:
        handle.remove()


@pytest.mark.parametrize("keep", [Keep(limit=0), Keep(limit=2000), Keep(torch.float64, "cpu"), Keep(torch.bfloat16)])
def test_what_is_kept_elsewhere_is_the_same_but_for_its_dtype(keep, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model = tiny.proven("gpt2")
    made = variants(model, 4)
    with Replay(model.module, model.anatomy) as replay:
        replay.record(IDS, MASK, attention=True)
        expected = torch.stack([replay.changed(*variant) for variant in made])
    with Replay(model.module, model.anatomy, keep=keep) as replay:
        replay.record(IDS, MASK, attention=True)
        assert bool(list(tmp_path.rglob("*.pt"))) == (keep.limit is not None)
        found = torch.stack([replay.changed(*variant) for variant in made])
    assert not list(tmp_path.glob("streamlens-*"))
    if keep.dtype == torch.bfloat16:
        assert 0 < float((found - expected).abs().mean()) < 1e-2 * float(expected.abs().max())
    else:
        assert torch.equal(found, expected)


def test_what_cannot_be_kept_is_refused():
    with pytest.raises(InputError, match="keep: dtype must be a floating-point torch dtype"):
        Keep(torch.int8)
    with pytest.raises(InputError, match="keep: limit must be a whole number"):
        Keep(limit=-1)
    with pytest.raises(InputError, match=r"keep must be sl\.Keep"):
        sl.ablate(tiny.proven("llama"), [[1, 2]], keep="disk")


def test_what_passes_by_is_seen():
    model, seen = tiny.proven("llama"), {}
    with Replay(model.module, model.anatomy, lambda layer, write, value: seen.__setitem__((layer, write.kind), value)) as replay:
        replay.record(IDS, MASK)
        assert set(seen) == {(layer, kind) for layer in range(3) for kind in ("attn", "mlp")}
        clean = dict(seen)
        seen.clear()
        write = model.anatomy.layers[1].writes[0]
        replay.changed(changes.head(1, write, 1))
        assert set(seen) == {(1, "attn"), (1, "mlp"), (2, "attn"), (2, "mlp")}
        assert not seen[1, "attn"][..., 8:16].any()
        assert torch.equal(seen[1, "attn"][..., :8], clean[1, "attn"][..., :8])
