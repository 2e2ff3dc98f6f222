//! One forward pass: tokens in, logits out. Read this file first.
//!
//! `m` tokens at positions `pos..pos + m`; every matrix is row-major with one row per token.

use super::arena::{Arena, Frame};
use super::linear::{Ctx, Product, Scratch, linear};
use super::probe::Probe;
use crate::arch::{Arch, AttnParams};
use crate::cache::KvCache;
use crate::error::SessionError;
use crate::lora::Attached;
use crate::model::{
    Activation, Experts, FeedForward, Ffn, Hparams, Layer, Model, Moe, Norm, NormKind, QkNorm, RopeOrder, Weight,
};
use crate::team::Crew;

/// Query rows that one attention task handles at a time.
const ATTN_ROWS: usize = 128;
/// Logits that one task caps: some ten microseconds of work.
const LOGITS: usize = 4096;
/// Most query heads that can share a key/value head: bounds the rows of a task.
pub(super) const MAX_GROUP: usize = 1024;

/// Rotation frequencies of a session, which depend on its context length, and the factor on cosines
/// and sines: of all layers, or of those that see everything and those with a window.
#[derive(Clone, Debug)]
pub(crate) struct RopeTables {
    pub(super) kinds: Vec<(Vec<f32>, f32)>,
}

impl RopeTables {
    pub(crate) fn new(model: &Model, n_ctx: usize) -> RopeTables {
        let (h, w) = (model.hparams(), model.weights());
        let factors = match &w.rope_factors_short_long {
            Some((_, long)) if n_ctx > h.rope.n_ctx_orig => Some(long),
            Some((short, _)) => Some(short),
            None => w.rope_factors.as_ref(),
        };
        let kind = |in_window| h.rope.frequencies(in_window, factors.map(Vec::as_slice));
        RopeTables { kinds: (0..rope_kinds(h)).map(|i| kind(i == 1)).collect() }
    }
}

/// Whether layers with a window rotate by frequencies of their own (2) or like all others (1).
pub(super) fn rope_kinds(h: &Hparams) -> usize {
    1 + usize::from(h.rope.theta_window.is_some())
}

/// What a pass works on.
pub(crate) struct Pass<'a> {
    pub(crate) model: &'a Model,
    pub(crate) adapters: &'a [Attached],
    pub(crate) rope: &'a RopeTables,
    pub(crate) kv: &'a mut KvCache,
    pub(crate) tokens: &'a [u32],
    /// Position of the first token.
    pub(crate) pos: usize,
    /// Logits are wanted from this token of the pass on.
    pub(crate) first_output: usize,
    /// If given, takes the normed states that the head read; logits are then left as the head's product.
    pub(crate) states: Option<&'a mut Vec<f32>>,
    /// Asked before every layer; `true` ends the pass.
    pub(crate) cancelled: &'a dyn Fn() -> bool,
}

/// The buffers of a pass.
struct Buffers<'a> {
    x: &'a mut [f32],
    normed: &'a mut [f32],
    branch: &'a mut [f32],
    /// Room for [`AttnBuffers`] or [`FfnBuffers`].
    inner: &'a mut [u8],
    /// Cosines and sines, `(m, n_dims/2)`, of each kind in [`RopeTables`].
    rope: [[&'a mut [f32]; 2]; 2],
    moe: MoeBuffers<'a>,
    scratch: Scratch<'a>,
}

/// Of attention; keys and values of `m_kv` tokens, the rest of the last `m` of them.
struct AttnBuffers<'a> {
    q: &'a mut [f32],
    k: &'a mut [f32],
    v: &'a mut [f32],
    /// Queries and outputs by KV head: `(n_head_kv, m_padded, n_group, head_dim)`.
    q_by_head: &'a mut [f32],
    out_by_head: &'a mut [f32],
    attn: &'a mut [f32],
}

impl<'a> AttnBuffers<'a> {
    fn take(frame: &mut Frame<'a>, h: &Hparams, m_kv: usize, m: usize) -> AttnBuffers<'a> {
        let (n_q, n_attn, m_padded) = (h.n_head * h.head_dim, h.n_head * h.head_dim_v, attn_tiles(h, m).1);
        AttnBuffers {
            q: frame.take(m * n_q),
            k: frame.take(m_kv * h.n_head_kv * h.head_dim),
            v: frame.take(m_kv * h.n_head_kv * h.head_dim_v),
            q_by_head: frame.take(m_padded * n_q),
            out_by_head: frame.take(m_padded * n_attn),
            attn: frame.take(m * n_attn),
        }
    }
}

/// Of a feed-forward layer.
struct FfnBuffers<'a> {
    gate: &'a mut [f32],
    up: &'a mut [f32],
}

impl<'a> FfnBuffers<'a> {
    fn take(frame: &mut Frame<'a>, m: usize, n_ff: usize) -> FfnBuffers<'a> {
        FfnBuffers { gate: frame.take(m * n_ff), up: frame.take(m * n_ff) }
    }
}

struct MoeBuffers<'a> {
    router: &'a mut [f32],
    chosen: &'a mut [u32],
    weights: &'a mut [f32],
    rows: &'a mut [u32],
    x: &'a mut [f32],
    y: &'a mut [f32],
}

/// Tokens that one attention task handles, and the padded number of tokens, which is never 0.
pub(super) fn attn_tiles(h: &Hparams, m: usize) -> (usize, usize) {
    let m = m.max(1);
    let tile = (ATTN_ROWS / h.n_group()).clamp(1, m);
    (tile, m.next_multiple_of(tile))
}

/// Room for products of `m` activation rows with any matrix of the model, outside of a pass.
pub(crate) fn with_scratch(
    model: &Model,
    arena: &mut Arena,
    m: usize,
    f: impl FnOnce(&mut Scratch<'_>),
) -> Result<(), SessionError> {
    f(&mut arena.plan(|frame| Scratch::take(frame, model, m, 0))?);
    Ok(())
}

impl<'a> Buffers<'a> {
    fn take(frame: &mut Frame<'a>, model: &Model, adapters: &[Attached], m: usize, n_outputs: usize) -> Buffers<'a> {
        let h = model.hparams();
        let n_ff = h.n_ff.max(h.experts.map_or(0, |x| x.n_ff_shared));
        let (n_expert, n_used, m_moe) = h.experts.map_or((0, 0, 0), |x| (x.n_expert, x.n_used, m));
        let angles = [1, rope_kinds(h) - 1].map(|kind| kind * m * h.rope.n_dims / 2);
        Buffers {
            x: frame.take(m * h.n_embd),
            normed: frame.take(m * h.n_embd),
            branch: frame.take(m * h.n_embd),
            inner: frame.take_either(|f| AttnBuffers::take(f, h, m, m), |f| FfnBuffers::take(f, m, n_ff)),
            rope: angles.map(|n| [frame.take(n), frame.take(n)]),
            moe: MoeBuffers {
                router: frame.take(m_moe * n_expert),
                chosen: frame.take(m_moe * n_used),
                weights: frame.take(m_moe * n_used),
                rows: frame.take(m_moe),
                x: frame.take(m_moe * h.n_embd),
                y: frame.take(m_moe * h.n_embd),
            },
            scratch: Scratch::take(frame, model, m.max(n_outputs), adapters.iter().map(|a| a.max_rank).sum()),
        }
    }

    /// Goes on without the first `n` rows.
    fn drop_rows(&mut self, n: usize, n_embd: usize) {
        for rows in [&mut self.x, &mut self.normed, &mut self.branch] {
            *rows = &mut std::mem::take(rows)[n * n_embd..];
        }
    }
}

/// Runs a pass and writes the logits of tokens `first_output..` into `logits`, `(n, n_vocab)`.
/// After an error the cache holds nothing new of value.
pub(crate) fn forward<P: Probe + ?Sized>(
    pass: Pass<'_>,
    crew: &Crew<'_>,
    arena: &mut Arena,
    logits: &mut [f32],
    probe: &mut P,
) -> Result<(), SessionError> {
    let Pass { model, adapters, rope, kv, tokens, pos, first_output, states, cancelled } = pass;
    let (h, w) = (model.hparams(), model.weights());
    let ctx = Ctx { arch: model.arch(), crew, gguf: model.gguf(), adapters };
    let m = tokens.len();
    let n_outputs = m - first_output;
    let mut b = arena.plan(|frame| Buffers::take(frame, model, adapters, m, n_outputs))?;

    embed(ctx, h, &w.token_embd, tokens, b.x);
    probe.tensor("inp_embd", 0, b.x);
    rotations(ctx, h, rope, pos, &mut b.rope);

    for (i, layer) in w.layers.iter().enumerate() {
        if cancelled() {
            return Err(SessionError::Cancelled);
        }
        norm(ctx, h, layer.attn_norm.as_ref(), b.x, b.normed);
        probe.tensor("attn_norm", i, b.normed);
        // Of tokens without logits nobody reads more of the last layer than keys and values.
        let first = if i + 1 == w.layers.len() && !probe.sees_all_rows() { first_output } else { 0 };
        attention(ctx, h, layer, i, (pos, first), kv, &mut b, probe);
        let n_rows = m - first;
        if n_rows == 0 {
            return Ok(());
        }
        b.drop_rows(first, h.n_embd);
        add_branch(ctx, h, layer.post_attn_norm.as_ref(), b.x, b.branch, b.normed);
        probe.tensor("ffn_inp", i, b.x);

        if !h.parallel_residual {
            norm(ctx, h, layer.ffn_norm.as_ref(), b.x, b.normed);
            probe.tensor("ffn_norm", i, b.normed);
        }
        match &layer.ffn {
            FeedForward::Dense(ffn) => {
                let show = |name: &str, values: &[f32]| probe.tensor(name, i, values);
                let inner = FfnBuffers::take(&mut Frame::of(b.inner), n_rows, ffn.up.w.n_out);
                feed_forward(ctx, &mut b.scratch, h.activation, ffn, b.normed, n_rows, inner, b.branch, show);
            }
            FeedForward::Moe(moe) => experts(ctx, h, moe, n_rows, &mut b),
        }
        probe.tensor("ffn_out", i, b.branch);
        add_branch(ctx, h, layer.post_ffn_norm.as_ref(), b.x, b.branch, b.normed);
        probe.tensor("l_out", i, b.x);
    }

    if n_outputs > 0 {
        let normed = &mut b.normed[..n_outputs * h.n_embd];
        norm(ctx, h, Some(&w.output_norm), &b.x[b.x.len() - n_outputs * h.n_embd..], normed);
        probe.tensor("result_norm", 0, normed);
        linear(ctx, &mut b.scratch, normed, n_outputs, &mut [Product::of(&w.output, logits, n_outputs)]);
        match states {
            Some(states) => states.extend_from_slice(normed),
            None => {
                let (finish, capped) = (h.logit_finish(), h.final_softcap > 0.0);
                ctx.crew.when(capped).for_chunks(logits, LOGITS, |_, logits| finish.row(logits));
            }
        }
        probe.tensor("result_output", 0, logits);
    }
    Ok(())
}

/// Looks up and scales the embeddings of `tokens`.
fn embed(ctx: Ctx<'_>, h: &Hparams, table: &Weight, tokens: &[u32], x: &mut [f32]) {
    let (data, row) = (table.data(ctx.gguf), table.row_bytes());
    ctx.crew.when(tokens.len() > 1).for_chunks(x, h.n_embd, |i, x| {
        let token = tokens[i] as usize;
        ctx.arch.dequantize(table.dtype, &data[token * row..][..row], x);
        // A product with a vector that is one at the token: of `A·x` one column is left.
        for (term, factor) in ctx.adapters.iter().filter_map(|a| a.term(table.site)) {
            for (a, b) in term.a().chunks_exact(h.n_vocab).zip(term.b().chunks_exact(h.n_embd)) {
                ctx.arch.add_scaled(x, b, factor * a[token]);
            }
        }
        if h.embd_scale != 1.0 {
            x.iter_mut().for_each(|x| *x *= h.embd_scale);
        }
    });
}

/// Cosines and sines of the pass's positions.
fn rotations(ctx: Ctx<'_>, h: &Hparams, tables: &RopeTables, pos: usize, rope: &mut [[&mut [f32]; 2]; 2]) {
    let n = h.rope.n_dims / 2;
    for ([cos, sin], (frequencies, factor)) in rope.iter_mut().zip(&tables.kinds) {
        for (i, (cos, sin)) in cos.chunks_exact_mut(n).zip(sin.chunks_exact_mut(n)).enumerate() {
            ctx.arch.rope_angles(cos, sin, frequencies, (pos + i) as f32, *factor);
        }
    }
}

/// Each row of `x`, normed; copied if there is no norm.
pub(super) fn norm(ctx: Ctx<'_>, h: &Hparams, norm: Option<&Norm>, x: &[f32], y: &mut [f32]) {
    let Some(norm) = norm else { return y.copy_from_slice(x) };
    ctx.crew.when(y.len() > h.n_embd).for_chunks(y, h.n_embd, |i, y| {
        let x = &x[i * h.n_embd..][..h.n_embd];
        match h.norm {
            NormKind::Rms => ctx.arch.rms_norm(y, x, &norm.w, h.norm_eps),
            NormKind::Layer => ctx.arch.layer_norm(y, x, &norm.w, &norm.b, h.norm_eps),
        }
    });
}

/// `x += residual_scale · norm(branch)`.
fn add_branch(ctx: Ctx<'_>, h: &Hparams, post: Option<&Norm>, x: &mut [f32], branch: &[f32], normed: &mut [f32]) {
    let branch = match post {
        Some(_) => {
            norm(ctx, h, post, branch, normed);
            &*normed
        }
        None => branch,
    };
    ctx.crew.when(x.len() > h.n_embd).for_chunks(x, h.n_embd, |i, x| {
        let branch = &branch[i * h.n_embd..][..h.n_embd];
        match h.residual_scale {
            1.0 => ctx.arch.add(x, branch),
            scale => ctx.arch.add_scaled(x, branch, scale),
        }
    });
}

/// Attention of layer `i` on `b.normed`; leaves its output in `b.branch`. Of the tokens before `first` it only
/// puts keys and values into the cache.
fn attention<P: Probe + ?Sized>(
    ctx: Ctx<'_>,
    h: &Hparams,
    layer: &Layer,
    i: usize,
    (pos, first): (usize, usize),
    kv: &mut KvCache,
    b: &mut Buffers<'_>,
    probe: &mut P,
) {
    let Ctx { arch, crew, .. } = ctx;
    let (m, m_kv) = (b.x.len() / h.n_embd - first, b.x.len() / h.n_embd);
    let AttnBuffers { q, k, v, q_by_head, out_by_head, attn } = AttnBuffers::take(&mut Frame::of(b.inner), h, m_kv, m);
    let of_q = Product::of(&layer.wq, q, m);
    let [of_k, of_v] = [Product::of(&layer.wk, k, m_kv), Product::of(&layer.wv, v, m_kv)];
    if first == 0 {
        linear(ctx, &mut b.scratch, b.normed, m, &mut [of_q, of_k, of_v]);
    } else {
        linear(ctx, &mut b.scratch, b.normed, m_kv, &mut [of_k, of_v]);
        if m > 0 {
            linear(ctx, &mut b.scratch, &b.normed[first * h.n_embd..], m, &mut [of_q]);
        }
    }
    probe.tensor("Qcur", i, q);
    if h.qk_norm == QkNorm::Full {
        for (x, norm, n) in [(&mut *q, &layer.q_norm, h.n_head), (&mut *k, &layer.k_norm, h.n_head_kv)] {
            let Some(w) = norm else { continue };
            let width = n * h.head_dim;
            for x in x.chunks_exact_mut(width) {
                let normed = &mut q_by_head[..width];
                arch.rms_norm(normed, x, w, h.norm_eps);
                x.copy_from_slice(normed);
            }
        }
    }
    let head_norms = head_norms(h, layer);
    let window = h.window_of(i);
    let [cos, sin] = &b.rope[if window.is_some() { rope_kinds(h) - 1 } else { 0 }];
    let rotate = |token: usize, x: &mut [f32]| rotate(arch, h, i, (cos, sin), token, x);
    let place = |from: &[f32], norm: Option<&Vec<f32>>, to: &mut [f32]| match norm {
        Some(w) => arch.rms_norm(to, from, w, h.norm_eps),
        None => to.copy_from_slice(from),
    };
    let (n_group, d, d_v) = (h.n_group(), h.head_dim, h.head_dim_v);
    let workers = crew.when(m_kv > 1);
    workers.for_chunks(k, h.n_head_kv * d, |token, k| {
        let mut buffer = [0.0; crate::arch::MAX_HEAD_DIM];
        for k in k.chunks_exact_mut(d) {
            place(k, head_norms.1, &mut buffer[..d]);
            rotate(token, &mut buffer[..d]);
            k.copy_from_slice(&buffer[..d]);
        }
    });
    probe.tensor("k", i, k);
    probe.tensor("v", i, v);
    kv.append(&workers, arch, i, pos, k, v);
    if m == 0 {
        return;
    }

    let (tile, m_padded) = attn_tiles(h, m);
    let q = &*q;
    crew.when(m > 1).for_chunks(q_by_head, m_padded * n_group * d, |head, to| {
        for (j, to) in to.chunks_exact_mut(d).take(m * n_group).enumerate() {
            let (token, q_head) = (j / n_group, head * n_group + j % n_group);
            place(&q[(token * h.n_head + q_head) * d..][..d], head_norms.0, to);
            rotate(first + token, to);
        }
    });
    probe.tensor("q_by_head", i, q_by_head);
    let params = AttnParams { head_dim: d, head_dim_v: d_v, scale: h.attn_scale, softcap: h.attn_softcap };
    let n_tiles = m_padded / tile;
    let (kv, q_by_head) = (&*kv, &*q_by_head);
    crew.for_chunks(out_by_head, tile * n_group * d_v, |task, out| {
        let (head, token) = (task / n_tiles, task % n_tiles * tile);
        let n_rows = tile.min(m - token) * n_group;
        let mut ranges = [(0, 0); MAX_GROUP];
        for (j, range) in ranges[..n_rows].iter_mut().enumerate() {
            let end = pos + first + token + j / n_group + 1;
            *range = (window.map_or(0, |size| end.saturating_sub(size)) as u32, end as u32);
        }
        let q = &q_by_head[(head * m_padded + token) * n_group * d..][..n_rows * d];
        kv.attention(arch, (i, head), &mut out[..n_rows * d_v], q, &ranges[..n_rows], &params);
    });
    let by_head = &*out_by_head;
    let attn = if m == 1 {
        by_head
    } else {
        crew.for_chunks(attn, h.n_head * d_v, |token, attn| {
            for (head, attn) in attn.chunks_exact_mut(n_group * d_v).enumerate() {
                attn.copy_from_slice(&by_head[(head * m_padded + token) * n_group * d_v..][..n_group * d_v]);
            }
        });
        &*attn
    };
    probe.tensor("kqv_out", i, attn);
    let branch = &mut b.branch[first * h.n_embd..];
    linear(ctx, &mut b.scratch, attn, m, &mut [Product::of(&layer.wo, branch, m)]);
    probe.tensor("attn_out", i, branch);
}

/// Norms of single query and key heads.
pub(super) fn head_norms<'a>(h: &Hparams, layer: &'a Layer) -> (Option<&'a Vec<f32>>, Option<&'a Vec<f32>>) {
    let per_head = h.qk_norm == QkNorm::PerHead;
    (layer.q_norm.as_ref().filter(|_| per_head), layer.k_norm.as_ref().filter(|_| per_head))
}

/// Rotates a head of `token` in layer `layer` by the pass's cosines and sines.
pub(super) fn rotate(arch: Arch, h: &Hparams, layer: usize, (cos, sin): (&[f32], &[f32]), token: usize, x: &mut [f32]) {
    let n = h.rope.n_dims / 2;
    let (cos, sin) = (&cos[token * n..][..n], &sin[token * n..][..n]);
    let x = &mut x[..h.rope.n_dims];
    match h.rope.order {
        _ if !h.has_rope(layer) => {}
        RopeOrder::Norm => arch.rope_norm(x, cos, sin),
        RopeOrder::NeoX => arch.rope_neox(x, cos, sin),
    }
}

/// `y = down(act(gate(x))·up(x))`, or `down(gelu(up(x)))`; `show` is given `gate(x)` and `up(x)`.
fn feed_forward(
    ctx: Ctx<'_>,
    scratch: &mut Scratch<'_>,
    activation: Activation,
    ffn: &Ffn,
    x: &[f32],
    m: usize,
    FfnBuffers { gate, up }: FfnBuffers<'_>,
    y: &mut [f32],
    mut show: impl FnMut(&str, &[f32]),
) {
    let n_ff = ffn.up.w.n_out;
    let workers = ctx.crew.when(m > 1);
    let inner = if let Some(w_gate) = &ffn.gate {
        linear(ctx, scratch, x, m, &mut [Product::of(w_gate, gate, m), Product::of(&ffn.up, up, m)]);
        show("ffn_gate", gate);
        show("ffn_up", up);
        let up = &*up;
        workers.for_chunks(gate, n_ff, |i, gate| match activation {
            Activation::Silu => ctx.arch.silu_mul(gate, &up[i * n_ff..][..n_ff]),
            Activation::Gelu => ctx.arch.gelu_mul(gate, &up[i * n_ff..][..n_ff]),
        });
        &*gate
    } else {
        linear(ctx, scratch, x, m, &mut [Product::of(&ffn.up, up, m)]);
        show("ffn_up", up);
        workers.for_chunks(up, n_ff, |_, up| ctx.arch.gelu(up));
        &*up
    };
    linear(ctx, scratch, inner, m, &mut [Product::of(&ffn.down, y, m)]);
}

/// Mixture of experts on `b.normed`; leaves its output in `b.branch`. Experts are taken in their
/// order, so a token's sum does not depend on the other tokens of the pass.
fn experts(ctx: Ctx<'_>, h: &Hparams, moe: &Moe, m: usize, b: &mut Buffers<'_>) {
    let Some(x) = h.experts else { return };
    let n = h.n_embd;
    let router = &mut b.moe.router[..m * x.n_expert];
    let (chosen, weights) = (&mut b.moe.chosen[..m * x.n_used], &mut b.moe.weights[..m * x.n_used]);
    linear(ctx, &mut b.scratch, b.normed, m, &mut [Product::of_weight(&moe.router, router, m)]);
    choose_experts(ctx, x, router, chosen, weights);
    b.branch.fill(0.0);
    for e in 0..x.n_expert {
        let mut n_rows = 0;
        for (token, chosen) in chosen.chunks_exact(x.n_used).enumerate() {
            if chosen.contains(&(e as u32)) {
                b.moe.rows[n_rows] = token as u32;
                b.moe.x[n_rows * n..][..n].copy_from_slice(&b.normed[token * n..][..n]);
                n_rows += 1;
            }
        }
        if n_rows == 0 {
            continue;
        }
        let expert = moe.expert(e);
        let inner = FfnBuffers::take(&mut Frame::of(b.inner), n_rows, expert.up.w.n_out);
        let (rows, y) = (&b.moe.x[..n_rows * n], &mut b.moe.y[..n_rows * n]);
        feed_forward(ctx, &mut b.scratch, h.activation, &expert, rows, n_rows, inner, y, |_, _| ());
        for (y, &token) in b.moe.y.chunks_exact(n).zip(&b.moe.rows[..n_rows]) {
            let slots = token as usize * x.n_used..(token as usize + 1) * x.n_used;
            for slot in slots.filter(|&slot| chosen[slot] == e as u32) {
                ctx.arch.add_scaled(&mut b.branch[token as usize * n..][..n], y, weights[slot]);
            }
        }
    }
    if let Some((shared, gate)) = &moe.shared {
        let strength = &mut router[..m];
        linear(ctx, &mut b.scratch, b.normed, m, &mut [Product::of_weight(gate, strength, m)]);
        let y = &mut b.moe.y[..m * n];
        let inner = FfnBuffers::take(&mut Frame::of(b.inner), m, shared.up.w.n_out);
        feed_forward(ctx, &mut b.scratch, h.activation, shared, b.normed, m, inner, y, |_, _| ());
        for ((branch, y), s) in b.branch.chunks_exact_mut(n).zip(b.moe.y.chunks_exact(n)).zip(&*strength) {
            ctx.arch.add_scaled(branch, y, 1.0 / (1.0 + (-*s).exp()));
        }
    }
}

/// Turns the router's outputs into probabilities, and each token's largest into weights.
pub(super) fn choose_experts(ctx: Ctx<'_>, x: Experts, router: &mut [f32], chosen: &mut [u32], weights: &mut [f32]) {
    let choices = chosen.chunks_exact_mut(x.n_used).zip(weights.chunks_exact_mut(x.n_used));
    for (p, (chosen, weights)) in router.chunks_exact_mut(x.n_expert).zip(choices) {
        ctx.arch.softmax(p);
        choose(p, chosen, weights);
        if x.normalise {
            let sum: f32 = weights.iter().sum();
            weights.iter_mut().for_each(|w| *w /= sum);
        }
    }
}

/// The `chosen.len()` largest of `p`, the lower index first among equals.
fn choose(p: &[f32], chosen: &mut [u32], weights: &mut [f32]) {
    for slot in 0..chosen.len() {
        let (taken, rest) = chosen.split_at_mut(slot);
        let mut best = None;
        for (e, &p) in p.iter().enumerate() {
            if !taken.contains(&(e as u32)) && best.is_none_or(|(_, max)| p > max) {
                best = Some((e as u32, p));
            }
        }
        // Not-a-number probabilities compare as smaller: some expert is still chosen.
        (rest[0], weights[slot]) = best.unwrap_or((0, 0.0));
    }
}
