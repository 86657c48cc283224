"""A decoder's forward pass written out slowly in float64: one loop a layer, a head and a query. The truth for the fast one."""

import math

import torch
import torch.nn.functional as F

from streamlens.decoder.rope import inverse_frequencies


def logits(d, ids):
    """Logits `[pos, vocab]` of one prompt."""
    c, n = d.config, len(ids)
    x = d.embed.weight[ids] * c.embed_multiplier
    if c.positions == "learned":
        x = x + d.pos_embed.weight[:n]
    if c.positions == "sinusoidal":
        x = x + torch.tensor([[_wave(p, i, c.d_model) for i in range(c.d_model)] for p in range(n)], dtype=x.dtype)
    x = norm(d.embed_norm, x)
    for layer, block in enumerate(d.blocks):
        x = PLACEMENTS["post" if layer < c.n_post_norm else c.placement](c, block, x, layer)
    z = F.linear(norm(d.final_norm, x), d.unembed.weight, d.unembed.bias) * c.logit_scale
    return z if c.logit_softcap is None else c.logit_softcap * torch.tanh(z / c.logit_softcap)


def _pre(c, b, x, layer):
    s = (layer + 1) ** -0.5 if c.placement == "layernorm-scaling" else 1.0
    x = x + c.residual_multiplier * attention(c, b.attn, norm(b.norm1, x) * s, layer)
    return x if b.mlp is None else x + c.residual_multiplier * mlp(c, b.mlp, norm(b.norm2, x) * s)


def _post(c, b, x, layer):
    alpha = (2 * c.n_layers) ** 0.25 if c.placement == "deepnorm" else 1.0
    x = norm(b.norm1, alpha * x + c.residual_multiplier * attention(c, b.attn, x, layer))
    return x if b.mlp is None else norm(b.norm2, alpha * x + c.residual_multiplier * mlp(c, b.mlp, x))


def _sandwich(c, b, x, layer):
    x = x + norm(b.norm1_post, attention(c, b.attn, norm(b.norm1, x), layer))
    return x if b.mlp is None else x + norm(b.norm2_post, mlp(c, b.mlp, norm(b.norm2, x)))


def _reordered(c, b, x, layer):
    x = x + norm(b.norm1, attention(c, b.attn, x, layer))
    return x if b.mlp is None else x + norm(b.norm2, mlp(c, b.mlp, x))


def _parallel(c, b, x, layer):
    return x + attention(c, b.attn, norm(b.norm1, x), layer) + mlp(c, b.mlp, norm(b.norm2 or b.norm1, x))


PLACEMENTS = {"pre": _pre, "mix-ln": _pre, "layernorm-scaling": _pre, "post": _post, "deepnorm": _post}
PLACEMENTS |= {"sandwich": _sandwich, "reordered": _reordered, "parallel": _parallel}


def norm(n, x):
    if n is None:
        return x
    x = x - x.mean(-1, keepdim=True) if type(n).__name__ == "LayerNorm" else x
    y = x / ((x**2).mean(-1, keepdim=True) + n.eps).sqrt()
    y = y if n.weight is None else y * n.weight
    return y if n.bias is None else y + n.bias


def attention(c, a, x, layer):
    e, n = c.head_width, len(x)
    q, k, v = (p(x) for p in (a.q_proj, a.k_proj, a.v_proj))
    if c.qk_norm == "width":
        q, k = norm(a.q_norm, q), norm(a.k_norm, k)
    z = torch.zeros(n, c.n_heads * e, dtype=x.dtype)
    for h in range(c.n_heads):
        shared = h // (c.n_heads // c.kv_heads)
        at, kv_at = slice(h * e, (h + 1) * e), slice(shared * e, (shared + 1) * e)
        qh, kh = (turned(c, y, n) for y in (_part(a, "q_norm", q, at), _part(a, "k_norm", k, kv_at)))
        for t in range(n):
            first = 0 if c.window_of(layer) is None else max(0, t - c.window + 1)
            scores = kh[first : t + 1] @ qh[t] * c.scale
            if c.attention_softcap is not None:
                scores = c.attention_softcap * torch.tanh(scores / c.attention_softcap)
            if c.positions == "alibi":
                scores = scores - slope(h, c.n_heads) * (t - torch.arange(first, t + 1))
            weights = scores.exp() / (scores.exp().sum() + (a.sinks[h].exp() if c.sink else 0))
            z[t, at] = weights @ v[first : t + 1, kv_at]
    return a.o_proj(z)


def _part(a, name, y, at):
    return norm(getattr(a, name), y[:, at]) if a.config.qk_norm == "head" else y[:, at]


def turned(c, x, n):
    if c.positions != "rope":
        return x
    theta, factor = inverse_frequencies(c, n)
    out, r = x.clone(), c.rotary_width
    for i in range(r // 2):
        one, two = (i, i + r // 2) if c.rope_pairs == "half" else (2 * i, 2 * i + 1)
        angle = torch.arange(n, dtype=torch.float32) * theta[i]
        cos, sin = (angle.cos() * factor).to(x.dtype), (angle.sin() * factor).to(x.dtype)
        out[:, one], out[:, two] = x[:, one] * cos - x[:, two] * sin, x[:, one] * sin + x[:, two] * cos
    return out


def slope(head, n_heads):
    """Press et al. 2021, their own recursion."""
    power = 2 ** math.floor(math.log2(n_heads))
    if head < power:
        return 2 ** (-8 * (head + 1) / power)
    return slope(2 * (head - power), 2 * power)


def mlp(c, m, x):
    if not c.n_experts:
        return dense(c, m.up_proj, getattr(m, "gate_proj", None), m.down_proj, x)
    out = torch.zeros_like(x)
    for t, row in enumerate(x):
        p = m.router(row).softmax(-1)
        chosen = sorted(range(c.n_experts), key=lambda e: -p[e])[: c.n_experts_active]
        total = sum(p[e] for e in chosen) if c.expert_weights_sum_to_one else 1.0
        for e in chosen:
            up, down = (lambda y, e=e: m.experts.up_proj[e] @ y), (lambda y, e=e: m.experts.down_proj[e] @ y)
            gate = None if m.experts.gate_proj is None else (lambda y, e=e: m.experts.gate_proj[e] @ y)
            out[t] += p[e] / total * dense(c, up, gate, down, row)
    if c.n_shared_experts:
        out = out + dense(c, m.shared_experts.up_proj, getattr(m.shared_experts, "gate_proj", None), m.shared_experts.down_proj, x)
    return out


def dense(c, up, gate, down, x):
    return down(act(c, up(x)) if gate is None else act(c, gate(x)) * up(x))


def act(c, x):
    if c.mlp == "swiglu":
        return x / (1 + (-x).exp())
    if c.mlp == "relu":
        return x.clamp_min(0)
    if c.gelu == "tanh":
        return x / 2 * (1 + torch.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * x**3)))
    return x / 2 * (1 + torch.erf(x / 2**0.5))


def _wave(position, i, d_model):
    angle = position / 10000 ** (2 * (i // 2) / d_model)
    return math.cos(angle) if i % 2 else math.sin(angle)
