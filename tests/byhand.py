"""Llama and GPT-2 written out from their raw weights in float64, one prompt at a time: the slow and obvious reference.

Nothing of streamlens and no forward pass of transformers is used here.
"""

from dataclasses import dataclass, field

import torch


@dataclass
class Trace:
    """What happened to one prompt. Streams and writes are `[pos, d_model]`, by (site or component, layer, head)."""

    writes: dict = field(default_factory=dict)
    sites: dict = field(default_factory=dict)
    inside: dict = field(default_factory=dict)  # (name, layer): z, v, pattern, post
    logits: torch.Tensor | None = None
    norm: object = None  # the final norm as a map of writes, its scale frozen at this prompt
    unembed: torch.Tensor | None = None  # [vocab, d_model]

    @property
    def final(self):
        return self.sites["final", self.n_layers]

    @property
    def n_layers(self):
        return max(layer for site, layer in self.sites if site == "final")

    def shares(self, target, versus=None):
        """The share of each component in logit `target`, less logit `versus`: `[pos]` by (component, layer, head)."""
        direction = self.unembed[target] - (0 if versus is None else self.unembed[versus])
        return {key: self.norm(key, write) @ direction for key, write in self.writes.items()}


def llama(module, ids, without=()):
    """`without` holds ("block" | "attn" | "mlp", layer)s to take away."""
    w, config, trace = weights(module), module.config, Trace()
    eps, d_head = config.rms_norm_eps, config.head_dim

    def rms(x, gain):
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * gain

    x = trace.writes["embed", -1, -1] = trace.sites["embed", 0] = w["model.embed_tokens.weight"][ids]
    for i in range(config.num_hidden_layers):
        name = f"model.layers.{i}"

        def attn(h, name=name, i=i):
            q, k, v = (linear(w, f"{name}.self_attn.{p}_proj", h).unflatten(-1, (-1, d_head)) for p in "qkv")
            q, k = rotated(q), rotated(k)
            return heads(w, trace, i, q, k, v, f"{name}.self_attn.o_proj")

        def mlp(h, name=name, i=i):
            gate, up = linear(w, f"{name}.mlp.gate_proj", h), linear(w, f"{name}.mlp.up_proj", h)
            trace.inside["post", i] = torch.nn.functional.silu(gate) * up
            return linear(w, f"{name}.mlp.down_proj", trace.inside["post", i])

        x = block(
            trace, i, x, without,
            lambda s, name=name, attn=attn: attn(rms(s, w[f"{name}.input_layernorm.weight"])),
            lambda s, name=name, mlp=mlp: mlp(rms(s, w[f"{name}.post_attention_layernorm.weight"])),
        )  # fmt: skip
    gain = w["model.norm.weight"]
    sigma = (x.square().mean(-1, keepdim=True) + eps).sqrt()
    trace.norm = lambda key, write: write * gain / sigma
    return finish(trace, x, rms(x, gain), w["lm_head.weight"])


def gpt2(module, ids, without=()):
    """`without` as for :func:`llama`."""
    w, config, trace = weights(module), module.config, Trace()
    eps = config.layer_norm_epsilon

    def layer_norm(x, name):
        x = x - x.mean(-1, keepdim=True)
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]

    def conv(name, x):
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    trace.writes["embed", -1, -1] = trace.sites["embed", 0] = w["transformer.wte.weight"][ids]
    trace.writes["pos_embed", -1, -1] = w["transformer.wpe.weight"][: len(ids)]
    x = trace.writes["embed", -1, -1] + trace.writes["pos_embed", -1, -1]
    for i in range(config.n_layer):
        name = f"transformer.h.{i}"

        def attn(h, name=name, i=i):
            q, k, v = (part.unflatten(-1, (config.n_head, -1)) for part in conv(f"{name}.attn.c_attn", h).chunk(3, dim=-1))
            return heads(w, trace, i, q, k, v, f"{name}.attn.c_proj", conv1d=True)

        def mlp(h, name=name, i=i):
            trace.inside["post", i] = torch.nn.functional.gelu(conv(f"{name}.mlp.c_fc", h), approximate="tanh")
            return conv(f"{name}.mlp.c_proj", trace.inside["post", i])

        x = block(
            trace, i, x, without,
            lambda s, name=name, attn=attn: attn(layer_norm(s, f"{name}.ln_1")),
            lambda s, name=name, mlp=mlp: mlp(layer_norm(s, f"{name}.ln_2")),
        )  # fmt: skip
    centred = x - x.mean(-1, keepdim=True)
    sigma = (centred.square().mean(-1, keepdim=True) + eps).sqrt()
    gain, bias = w["transformer.ln_f.weight"], w["transformer.ln_f.bias"]
    trace.writes["norm_bias", config.n_layer, -1] = bias.expand(x.shape)
    trace.norm = lambda key, write: write if key[0] == "norm_bias" else (write - write.mean(-1, keepdim=True)) * gain / sigma
    return finish(trace, x, layer_norm(x, "transformer.ln_f"), w["transformer.wte.weight"])


def weights(module):
    return {name: weight.detach().double() for name, weight in module.named_parameters()}


def linear(w, name, x):
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)


def rotated(x):
    """Rotary positions with theta 10000; x is `[pos, head, d_head]`, its halves are the two coordinates."""
    half = x.shape[-1] // 2
    angle = torch.arange(len(x), dtype=x.dtype)[:, None] * 10000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def heads(w, trace, layer, q, k, v, projection, conv1d=False):
    """Causal attention; each head's z through its own rows of the output projection is one write."""
    trace.inside["v", layer] = v
    n_heads, d_head = q.shape[1:]
    k, v = (t.repeat_interleave(n_heads // t.shape[1], dim=1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / d_head**0.5
    pattern = scores.masked_fill(torch.ones(len(q), len(q)).triu(1).bool(), float("-inf")).softmax(-1)
    z = torch.einsum("hqk,khd->qhd", pattern, v)
    trace.inside["pattern", layer], trace.inside["z", layer] = pattern, z
    out = w[f"{projection}.weight"] if conv1d else w[f"{projection}.weight"].T
    writes = {("head", layer, h): z[:, h] @ out[h * d_head : (h + 1) * d_head] for h in range(n_heads)}
    if f"{projection}.bias" in w:
        writes["attn_bias", layer, -1] = w[f"{projection}.bias"].expand(len(q), -1)
    return writes


def block(trace, i, x, without, attn, mlp):
    trace.sites["resid_pre", i] = x
    if ("block", i) in without:
        trace.sites["resid_post", i] = x
        return x
    writes = {} if ("attn", i) in without else attn(x)
    trace.writes |= writes
    trace.sites["attn_out", i] = sum(writes.values(), torch.zeros_like(x))
    trace.sites["resid_mid", i] = x = x + trace.sites["attn_out", i]
    if ("mlp", i) not in without:
        trace.writes["mlp", i, -1] = trace.sites["mlp_out", i] = mlp(x)
        x = x + trace.sites["mlp_out", i]
    trace.sites["resid_post", i] = x
    return x


def finish(trace, x, normed, unembed):
    trace.sites["final", 1 + max(layer for _, layer in trace.sites)] = x
    trace.unembed, trace.logits = unembed, normed @ unembed.T
    return trace
