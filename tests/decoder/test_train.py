"""Training: what a step does by hand, that a run taken up again is the run itself, and that every kind of decoder learns."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import streamlens as sl
from streamlens.decoder.checkpoint import checkpoints, decoder_at, read_checkpoint
from streamlens.decoder.config import DecoderConfig
from streamlens.decoder.data import Text, batch_of
from streamlens.decoder.look import look
from streamlens.decoder.model import Decoder
from streamlens.decoder.tasks import ModularAddition, RepeatedTokens
from streamlens.decoder.train import TrainConfig, make_optimizer, train
from streamlens.errors import InputError, NumericError, SourceError

TEXT = Text("In the beginning there was the word, and the word was tokenized. " * 9, length=12)
SHORT = TrainConfig(steps=8, batch=4, warm_up=3, look_every=3)


def decoder(n_vocab=256, seed=0, **fields):
    sizes = {"d_model": 16, "n_layers": 2, "n_heads": 2, "max_length": 64}
    return Decoder(DecoderConfig(n_vocab=n_vocab, **(sizes | fields)), seed=seed)


def same_history(one, other):
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in vars(one))


def same_weights(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


# -- a step ------------------------------------------------------------------------------------------------------------
def test_two_steps_by_hand():
    """Decay, then Adam's update of the clipped gradient, written out as in the paper."""
    config = TrainConfig(steps=2, batch=4, warm_up=2, learning_rate=0.01, weight_decay=0.3, clip=0.2, seed=5)
    model, ours = decoder(), decoder()
    history = train(ours, TEXT, config)
    mean = {name: torch.zeros_like(w) for name, w in model.named_parameters()}
    square = {name: torch.zeros_like(w) for name, w in model.named_parameters()}
    for step in range(2):
        ids = batch_of(TEXT, 4, 5, step).ids
        loss = -model(ids).logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).mean()
        model.zero_grad()
        loss.backward()
        norm = math.sqrt(sum(float(w.grad.double().square().sum()) for w in model.parameters()))
        rate = 0.005 * (step + 1)
        assert history.loss[step] == pytest.approx(loss.item(), rel=1e-5)
        assert history.gradient_norm[step] == pytest.approx(norm, rel=1e-4)
        assert history.learning_rate[step] == rate
        with torch.no_grad():
            for name, w in model.named_parameters():
                gradient = w.grad * min(1.0, 0.2 / (norm + 1e-6))
                mean[name] = 0.9 * mean[name] + 0.1 * gradient
                square[name] = 0.95 * square[name] + 0.05 * gradient**2
                w *= 1 - rate * (0.3 if w.dim() >= 2 else 0.0)
                m, v = mean[name] / (1 - 0.9 ** (step + 1)), square[name] / (1 - 0.95 ** (step + 1))
                w -= rate * m / (v.sqrt() + 1e-8)
    for (name, w), got in zip(model.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(got, w, atol=2e-4, rtol=0, msg=lambda m, name=name: f"{name}: {m}")


def test_matrices_decay_and_vectors_do_not():
    model = decoder(norm="layernorm", norm_bias=True, qkv_bias=True, sink=True, n_experts=2)
    groups = {g["weight_decay"]: {id(w) for w in g["params"]} for g in make_optimizer(model, SHORT).param_groups}
    for weight in model.parameters():
        assert id(weight) in groups[0.1 if weight.dim() >= 2 else 0.0]


def test_frozen_weights_stay():
    model = decoder()
    model.embed.requires_grad_(False)
    before = model.embed.weight.clone()
    train(model, TEXT, SHORT)
    assert torch.equal(model.embed.weight, before)


def test_rate_goes_up_a_line_and_down_a_cosine():
    config = TrainConfig(steps=21, warm_up=4, learning_rate=0.8, final_share=0.25)
    rates = [config.rate_at(step) for step in range(21)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8])
    assert rates[12] == pytest.approx((0.8 + 0.2) / 2)
    assert rates[-1] == pytest.approx(0.2)
    assert TrainConfig(steps=1, warm_up=0).rate_at(0) == 1e-3


# -- a run -------------------------------------------------------------------------------------------------------------
def test_same_seed_same_run_and_the_users_generator_is_left_alone():
    torch.manual_seed(7)
    wanted = torch.rand(1)
    torch.manual_seed(7)
    one, other = decoder(), decoder()
    assert same_history(train(one, TEXT, SHORT), train(other, TEXT, SHORT))
    assert same_weights(one, other)
    assert torch.equal(torch.rand(1), wanted)
    third = train(decoder(), TEXT, TrainConfig(steps=8, batch=4, warm_up=3, look_every=3, seed=1))
    assert third.loss[0] != pytest.approx(train(decoder(), TEXT, SHORT).loss[0], rel=1e-9)


class Dropping(torch.nn.Module):
    """A decoder in a module of the user's own, which draws: its generator must be taken up too."""

    def __init__(self):
        super().__init__()
        self.decoder = decoder()

    def forward(self, ids):
        out = self.decoder(ids)
        return type(out)(F.dropout(out.logits, 0.3, self.training))


@pytest.mark.parametrize("make", [decoder, Dropping])
def test_a_run_taken_up_again_is_the_unbroken_one(make, tmp_path):
    config = TrainConfig(steps=8, batch=4, warm_up=3, look_every=3, checkpoint_every=3)
    whole = make()
    wanted = train(whole, TEXT, config)
    first = make()
    assert len(train(first, TEXT, config, folder=tmp_path, until=5)) == 5
    assert list(checkpoints(tmp_path)) == [3, 5]
    torch.rand(3)  # what happens in between plays no part
    again = make(seed=9) if make is decoder else make()
    assert same_history(train(again, TEXT, config, folder=tmp_path), wanted)
    assert same_weights(again, whole)
    assert list(checkpoints(tmp_path)) == [3, 5, 6, 8]
    assert same_history(train(make(), TEXT, config, folder=tmp_path), wanted)  # it is done already
    assert not whole.training or whole.training == make().training


def test_a_killed_run_is_taken_up_at_its_last_checkpoint(tmp_path):
    class Killed(Exception):
        pass

    class Data:
        n_vocab, length = TEXT.n_vocab, TEXT.length
        alive = 0

        def draw(self, n, generator):
            self.alive -= 1
            if not self.alive:
                raise Killed
            return TEXT.draw(n, generator)

        def __repr__(self):
            return "mortal text"

    config = TrainConfig(steps=8, batch=4, warm_up=3, look_every=3, checkpoint_every=2)
    wanted = train(decoder(), Data(), config)
    data = Data()
    data.alive = 6
    model = decoder()
    with pytest.raises(Killed):
        train(model, data, config, folder=tmp_path)
    assert all(w.grad is None for w in model.parameters())
    (tmp_path / ".step-000006.pt.123.tmp").write_bytes(b"half")  # what a killed writer leaves is no checkpoint
    assert list(checkpoints(tmp_path)) == [2, 4]
    assert same_history(train(decoder(), data, config, folder=tmp_path), wanted)


def test_half_a_checkpoint_is_never_there(tmp_path, monkeypatch):
    def full_disk(state, file):
        file.write(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(OSError, match="no space left"):
        train(decoder(), TEXT, SHORT, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_is_the_decoder_of_its_step(tmp_path):
    config = TrainConfig(steps=6, batch=4, warm_up=3, checkpoint_every=3)
    model = decoder()
    train(model, TEXT, config, folder=tmp_path)
    ids = batch_of(TEXT, 2, 0, 0).ids
    last = decoder_at(checkpoints(tmp_path)[6])
    assert not last.training
    assert torch.equal(last(ids).logits, model.eval()(ids).logits)
    assert not torch.equal(decoder_at(checkpoints(tmp_path)[3])(ids).logits, last(ids).logits)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": TrainConfig(steps=9, batch=4, warm_up=3, look_every=3)}, "step-000008.pt has steps 8; got 9"),
        ({"data": Text("another text", length=12)}, r"step-000008.pt has data \"Text\(.*got \"Text\("),
        ({"model": decoder(d_model=32)}, "step-000008.pt has d_model 16; got 32"),
    ],
)
def test_another_runs_folder_is_refused(change, message, tmp_path):
    given = {"model": decoder(), "data": TEXT, "config": SHORT}
    train(**given, folder=tmp_path)
    with pytest.raises(InputError, match=message):
        train(**(given | change), folder=tmp_path)


def test_damaged_and_foreign_checkpoints_are_refused(tmp_path):
    train(decoder(), TEXT, SHORT, folder=tmp_path)
    path = checkpoints(tmp_path)[8]
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(SourceError, match=r"cannot read the checkpoint .*step-000008.pt"):
        train(decoder(), TEXT, SHORT, folder=tmp_path)
    torch.save([1], path)
    with pytest.raises(SourceError, match=r"step-000008.pt is no checkpoint of a training run"):
        read_checkpoint(path)


def test_a_loss_that_is_not_finite_stops_before_the_update():
    model = decoder()
    with torch.no_grad():
        model.embed.weight[ord("e")] = math.inf
    before = model.unembed.weight.clone()
    with pytest.raises(NumericError, match=r"step 0 gives a loss of nan"):
        train(model, TEXT, SHORT)
    assert torch.equal(model.unembed.weight, before)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"data": RepeatedTokens(n_tokens=300)}, "data must have at most n_vocab = 256 token ids; got 301"),
        ({"data": Text("long " * 40, length=65)}, "rows of at most max_length = 64 tokens; got 65"),
        ({"model": decoder().requires_grad_(False)}, "a weight that requires a gradient; got none"),
        ({"until": 0}, "until must be a whole number, 1 or more; got 0"),
    ],
)
def test_what_cannot_be_trained_is_refused(given, message):
    with pytest.raises(InputError, match=message):
        train(**({"model": decoder(), "data": TEXT, "config": SHORT} | given))


@pytest.mark.parametrize(("name", "value"), [("steps", 0), ("warm_up", -1), ("final_share", 1.5), ("clip", 0.0), ("learning_rate", -1.0)])
def test_impossible_settings_are_refused(name, value):
    with pytest.raises(InputError, match=f"{name} must be"):
        TrainConfig(**({"steps": 8} | {name: value}))


# -- what is seen inside -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("fields", [{}, {"placement": "parallel"}, {"mlp": "none", "window": 4}, {"attention_softcap": 0.5}])
def test_a_look_sees_what_is_recorded(fields):
    model, ids = decoder(init_std=0.3, **fields).eval(), batch_of(TEXT, 3, 0, 0).ids
    largest, norms = look(model, ids)
    recorded = sl.record(sl.load(model), ids, sites=["resid_pre", "resid_post", "q", "k"])
    streams = [recorded[f"blocks.{name}"] for name in ("0.hook_resid_pre", "1.hook_resid_pre", "1.hook_resid_post")]
    assert norms == pytest.approx([stream.norm(dim=-1).mean().item() for stream in streams], rel=1e-5)
    at = torch.arange(ids.shape[1])
    seen = (at[:, None] >= at) & (at[:, None] - at < fields.get("window", 99))
    for layer in range(2):
        q, k = (recorded[f"blocks.{layer}.attn.hook_rot_{name}"].transpose(1, 2) for name in "qk")
        scores = (q @ k.transpose(-1, -2) * model.config.scale)[..., seen]
        cap = fields.get("attention_softcap")
        assert largest[layer] == pytest.approx((cap * torch.tanh(scores / cap) if cap else scores).max().item(), rel=1e-5)
    assert look(model, ids) == (largest, norms)  # nothing is left behind
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_run_looks_inside_now_and_then():
    history = train(decoder(), TEXT, SHORT)
    assert history.looked.tolist() == [0, 3, 6]
    assert history.attention_logit.shape == (3, 2)
    assert history.stream_norm.shape == (3, 3)
    first = look(decoder(), batch_of(TEXT, 4, 0, 0).ids)
    assert (history.attention_logit[0].tolist(), history.stream_norm[0].tolist()) == first
    none = train(decoder(), TEXT, TrainConfig(steps=2, batch=2, look_every=0))
    assert none.attention_logit.shape[0] == 0


# -- it learns ---------------------------------------------------------------------------------------------------------
def test_a_few_steps_learn_a_text():
    history = train(decoder(d_model=32), TEXT, TrainConfig(steps=60, batch=16, warm_up=5, learning_rate=0.01))
    assert history.loss[-5:].mean() < 0.6 * history.loss[0]


@pytest.mark.parametrize(
    "fields", [{"n_experts": 4, "placement": "sandwich"}, {"placement": "deepnorm", "init": "deepnorm", "positions": "learned"}]
)
def test_other_kinds_learn_too(fields):
    task = ModularAddition(p=5)
    history = train(decoder(task.n_vocab, **fields), task, TrainConfig(steps=60, batch=32, warm_up=5, learning_rate=0.01))
    assert history.loss[-5:].mean() < 0.6 * history.loss[0]


def test_the_balancing_loss_of_a_mixture_reaches_its_router():
    task, config = ModularAddition(p=5), TrainConfig(steps=1, batch=16, warm_up=0, weight_decay=0.0)
    norms = {}
    for weight in (0.0, 50.0):
        norms[weight] = train(decoder(task.n_vocab, n_experts=4, aux_loss=weight, init_std=0.3), task, config)
    assert norms[0.0].loss[0] == norms[50.0].loss[0]
    assert norms[50.0].gradient_norm[0] > 1.5 * norms[0.0].gradient_norm[0]


def test_bf16_learns_and_keeps_float32_weights():
    model = decoder(n_kv_heads=1)
    config = TrainConfig(steps=30, batch=8, warm_up=5, learning_rate=0.01)
    history = train(model, TEXT, TrainConfig(steps=30, batch=8, warm_up=5, learning_rate=0.01, bf16=True))
    assert {w.dtype for w in model.parameters()} == {torch.float32}
    wide = train(decoder(n_kv_heads=1), TEXT, config)
    assert history.loss[-1] < 0.8 * history.loss[0]
    assert history.loss[0] == pytest.approx(wide.loss[0], rel=0.01)
    assert history.loss[0] != wide.loss[0]
