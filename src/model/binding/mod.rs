//! Binding: weights found by name, with shapes checked; the bytes stay in the file.

mod attention;
mod binder;
mod compressed;
mod drafter;
mod feed_forward;
mod layer;
mod recurrent;

use crate::compute::weight::{Bias, Linear, Weight};
use crate::gguf::{Gguf, TensorInfo};
use crate::layers::altup::spec::StreamsSpec;
use crate::layers::altup::weights::AltUpEnds;
use crate::layers::attention::balance::balance;
use crate::layers::classifier::{Classifier, ClassifierSpec};
use crate::layers::hparams::Hparams;
use crate::layers::hyper::spec::{HyperKind, HyperSpec};
use crate::layers::hyper::weights::{Connection, LowRank, Weighed};
use crate::layers::layer::weights::Layer;
use crate::layers::mtp::MtpInput;
use crate::layers::norm::spec::Norms;
use crate::layers::norm::weights::Norm;
use crate::layers::per_layer_embedding::PerLayerInputs;
use crate::layers::rope::spec::RopeScaling;
use crate::layers::rope::weights::RopeFactors;
use crate::layers::stacks::Stacks;
use crate::lora::{TOKEN_EMBD, in_layer};
use crate::model::ModelError;
use crate::model::binding::binder::Binder;
use crate::model::binding::layer::layer;
use crate::model::keys::UnknownNames;
use crate::model::weights::Weights;

impl Weights {
    /// Binds every tensor that `h` requires; `unknown` decides what happens to others, `progress`
    /// is told the share done and may cancel.
    pub(crate) fn bind(
        gguf: &Gguf,
        h: &Hparams,
        unknown: &mut UnknownNames,
        progress: &mut dyn FnMut(f32) -> bool,
    ) -> Result<Weights, ModelError> {
        let b = Binder::new(gguf);
        let token_embd = b.weight(TOKEN_EMBD, h.n_embd, h.n_vocab, 1)?;
        let position_embd = h
            .learned_positions
            .then(|| b.table("position_embd.weight", h.n_embd, h.n_ctx_train));
        let position_embd = position_embd.transpose()?;
        let embd_norm = h
            .embd_norm
            .then(|| match h.embd_norm_plain {
                true => Ok(Norm::plain(h.n_embd)),
                false => b.norm("token_embd_norm", h),
            })
            .transpose()?;
        let per_layer = h.per_layer_embd.map(|n| per_layer_inputs(&b, h, n));
        let per_layer = per_layer.transpose()?;
        let alt_up = h.streams.map(|spec| streams(&b, h, spec)).transpose()?;
        let token_types = h
            .token_types
            .then(|| b.first_row("token_types.weight", h.n_embd))
            .transpose()?;
        let stacks = h.stacks.map(|_| stacks(&b, h)).transpose()?;
        let output_norm = output_norm(&b, h)?;
        let output = head(&b, h, &token_embd)?;
        let layers = layers(&b, h, output_norm.as_ref(), progress)?;
        let mut dense = Vec::new();
        for (i, &(n_in, n_out)) in h.dense.iter().enumerate() {
            dense.push(b.table(&format!("dense_{}.weight", i + 2), n_in, n_out)?);
        }
        let bind_head = |spec| b.fixed(|b| classifier(b, h, spec));
        let classifier = h.classifier.as_ref().map(bind_head).transpose()?;
        let rope_factors = rope_factors(&b, h)?;
        let weighed = h.hyper.filter(|spec| spec.weighs_last);
        let hyper = weighed.map(|spec| {
            let n_weight = match spec.kind {
                HyperKind::LowRank { .. } => 0,
                HyperKind::Independent { .. } | HyperKind::Manifold { .. } => spec.n_stream,
            };
            connection(&b, h, "output_hc", (n_weight, 1, spec))
        });
        let hyper = hyper.transpose()?;
        let scores = h
            .checkpoints
            .map(|_| b.vector("output_res_score.weight", h.n_embd));
        let residual_scores = scores.transpose()?;
        b.none_ignored(h, unknown)?;
        b.uniform(h)?;
        Ok(Weights {
            token_embd,
            mtp: None,
            hyper,
            residual_scores,
            alt_up,
            per_layer,
            position_embd,
            token_types,
            embd_norm,
            stacks,
            layers,
            output_norm,
            output,
            dense,
            classifier,
            rope_factors,
            shapes: b.shapes.into_inner().into_iter().collect(),
            sites: b.sites.into_inner().into(),
        })
    }

    /// Binds block `i` of the file, whose specification is `h`: what it lacks it shares with the
    /// model. Nobody adapts it, so that it has no sites.
    pub(super) fn bind_mtp(
        gguf: &Gguf,
        h: &Hparams,
        i: usize,
        model: &Weights,
    ) -> Result<Weights, ModelError> {
        let b = Binder::new(gguf);
        let name = |part: &str| format!("blk.{i}.nextn.{part}");
        let matrix =
            |part: &str| b.opt_weight(&name(&format!("{part}.weight")), h.n_embd, h.n_vocab, 1);
        // Ling 3 names it otherwise. Blocks with an index do not use it.
        let norms = [
            name("shared_head_norm"),
            format!("blk.{i}.layer_output_norm"),
        ];
        let output_norm = norms.iter().find(|norm| b.has(&format!("{norm}.weight")));
        let output_norm = output_norm.map(|norm| b.norm(norm, h)).transpose()?;
        for part in ["attn_k", "attn_q_b", "k_norm", "proj"] {
            ["weight", "bias"]
                .iter()
                .for_each(|suffix| b.skip(&format!("blk.{i}.indexer.{part}.{suffix}")));
        }
        let mtp = MtpInput {
            embd_norm: b.norm(&name("enorm"), h)?,
            state_norm: b.norm(&name("hnorm"), h)?,
            proj: b.linear(&name("eh_proj"), 2 * h.n_embd, h.n_embd, false)?,
        };
        let layers = h
            .layers
            .iter()
            .map(|spec| layer(&b, h, spec, i, None))
            .collect::<Result<_, _>>()?;
        let (token_embd, output) = (matrix("embed_tokens")?, matrix("shared_head_head")?);
        let is_left = |t: &&TensorInfo| {
            in_layer(&t.name).is_some_and(|(block, _)| block == i)
                && !b.used.borrow().contains(t.name.as_str())
        };
        if let Some(t) = gguf.tensors().iter().find(is_left) {
            return Err(ModelError::UnknownTensor {
                name: t.name.clone(),
                arch: h.arch.clone(),
            });
        }
        let output = output.map_or_else(|| model.output.clone(), |w| Linear { w, b: None });
        b.shapes
            .borrow_mut()
            .insert((output.w.dtype, output.w.n_in));
        Ok(Weights {
            token_embd: token_embd.unwrap_or_else(|| model.token_embd.clone()),
            mtp: Some(mtp),
            layers,
            output_norm: output_norm.or_else(|| model.output_norm.clone()),
            output,
            shapes: b.shapes.into_inner().into_iter().collect(),
            sites: [].into(),
            rope_factors: model.rope_factors.clone(),
            // The families with such blocks have nothing of this.
            alt_up: None,
            hyper: None,
            residual_scores: None,
            per_layer: None,
            position_embd: None,
            token_types: None,
            embd_norm: None,
            stacks: None,
            dense: Vec::new(),
            classifier: None,
        })
    }
}

/// All layers; those of later loops share the weights of the first one's.
fn layers(
    b: &Binder<'_>,
    h: &Hparams,
    output_norm: Option<&Norm>,
    progress: &mut dyn FnMut(f32) -> bool,
) -> Result<Vec<Layer>, ModelError> {
    let mut layers = Vec::<Layer>::with_capacity(h.n_layer);
    for (i, spec) in h.layers.iter().enumerate() {
        let source = layers.get(h.kv_layers[i]);
        let source = source.and_then(|layer| layer.attn.as_ref());
        let own = h.own(i);
        let mut bound = match (0..i).find(|&earlier| h.own(earlier) == own) {
            None => layer(b, h, spec, own, source)?,
            Some(same) => layers[same].clone(),
        };
        if h.n_loop > 1 {
            let has_last = spec.norms == Norms::BeforeAndLast;
            bound.post_ffn_norm = output_norm.filter(|_| has_last).cloned();
        }
        layers.push(bound);
        if !progress((i + 1) as f32 / h.n_layer as f32) {
            return Err(ModelError::Cancelled);
        }
    }
    balance_keys(h, &mut layers);
    Ok(layers)
}

/// Balances queries and keys of the layers whose keys no other layer reads.
fn balance_keys(h: &Hparams, layers: &mut [Layer]) {
    let shares = |i: usize| h.layers[i].attention().is_some_and(|a| a.shares_kv);
    for (i, layer) in layers.iter_mut().enumerate() {
        let is_shared =
            (0..h.layers.len()).any(|j| shares(j) && (j == i || h.kv_layers[j] == h.kv_layers[i]));
        if let (false, Some(spec), Some(attn)) =
            (is_shared, h.layers[i].attention(), &mut layer.attn)
        {
            balance(spec, spec.rope.map(|id| h.rope(id)), attn);
        }
    }
}

/// The norm behind the last layer.
fn output_norm(b: &Binder<'_>, h: &Hparams) -> Result<Option<Norm>, ModelError> {
    // LFM2's files call it by the name of another, NeoBERT's by that of an encoder's.
    let own = format!("{}output_norm", h.prefix);
    let mut names = [&own, "enc.output_norm", "token_embd_norm"].into_iter();
    let is_there = |name: &&str| b.has(&format!("{name}.weight"));
    let name = names
        .find(is_there)
        .filter(|_| !h.embd_norm)
        .unwrap_or(&own);
    h.final_norm.then(|| b.norm(name, h)).transpose()
}

/// The head, which may share the embedding table.
fn head(b: &Binder<'_>, h: &Hparams, token_embd: &Weight) -> Result<Linear, ModelError> {
    if b.has("output.weight") {
        return b.linear("output", h.n_embd, h.n_vocab, h.head_bias);
    }
    let site = b.site("output.weight", h.n_embd, h.n_vocab, 1);
    Ok(Linear {
        w: Weight {
            site,
            ..token_embd.clone()
        },
        b: b.opt_vector("output.bias", h.n_vocab)?.map(Bias::new),
    })
}

/// A connection of several residual streams, with so many weights of so many kinds.
fn connection(
    b: &Binder<'_>,
    h: &Hparams,
    name: &str,
    (n_weight, n_scale, spec): (usize, usize, HyperSpec),
) -> Result<Connection, ModelError> {
    let part = |part: &str| format!("{name}_{part}");
    let n_in = spec.n_stream * h.n_embd;
    if let HyperKind::LowRank { rank } = spec.kind {
        let matrix = |name: &str, n_in: usize, n_out: usize| {
            b.fixed(|b| b.linear(&part(name), n_in, n_out, false))
        };
        return Ok(Connection::LowRank(LowRank {
            norm: b.vector(&part("norm.weight"), n_in)?,
            down: matrix("down", n_in, rank)?,
            up: matrix("up", rank, n_in)?,
            inject: (n_weight > 0)
                .then(|| matrix("inject", n_in, n_weight))
                .transpose()?,
        }));
    }
    Ok(Connection::Weighed(Weighed {
        w: b.fixed(|b| b.linear(&part("fn"), n_in, n_weight, false))?,
        scale: b.vector(&part("scale.weight"), n_scale)?,
        base: b.vector(&part("base.weight"), n_weight)?,
    }))
}

/// Weights of the vectors that each layer has for each token.
fn per_layer_inputs(b: &Binder<'_>, h: &Hparams, n: usize) -> Result<PerLayerInputs, ModelError> {
    Ok(PerLayerInputs {
        table: b.table("per_layer_token_embd.weight", h.n_layer * n, h.n_vocab)?,
        proj: b.weight("per_layer_model_proj.weight", h.n_embd, h.n_layer * n, 1)?,
        norm: b.vector("per_layer_proj_norm.weight", n)?,
    })
}

/// What two stacks have together.
fn stacks(b: &Binder<'_>, h: &Hparams) -> Result<Stacks, ModelError> {
    Ok(Stacks {
        first: b.vector("hrm.z_l_init", h.n_embd)?,
        norm: Norm::plain(h.n_embd),
    })
}

/// Matrices that make residual streams and bring them together.
fn streams(b: &Binder<'_>, h: &Hparams, spec: StreamsSpec) -> Result<AltUpEnds, ModelError> {
    let n = spec.n_stream - 1;
    let matrices = |name: &str| {
        let all = b.weight(name, h.n_embd, h.n_embd, n)?;
        Ok::<_, ModelError>((0..n).map(|i| all.matrix(i, n)).collect())
    };
    Ok(AltUpEnds {
        project: matrices("altup_proj.weight")?,
        unproject: matrices("altup_unembd_proj.weight")?,
    })
}

/// Head of a reranker.
fn classifier(
    b: &Binder<'_>,
    h: &Hparams,
    spec: &ClassifierSpec,
) -> Result<Classifier, ModelError> {
    let n_in = spec.n_hidden.unwrap_or(h.n_embd);
    Ok(Classifier {
        hidden: spec
            .n_hidden
            .map(|n| b.linear("cls", h.n_embd, n, false))
            .transpose()?,
        norm: spec.norm.then(|| b.norm("cls.norm", h)).transpose()?,
        output: spec
            .n_label
            .map(|n| b.linear("cls.output", n_in, n, false))
            .transpose()?,
    })
}

/// Divisors of the rope frequencies: the sets for short and long contexts come together.
fn rope_factors(b: &Binder<'_>, h: &Hparams) -> Result<RopeFactors, ModelError> {
    let Some(rope) = h.ropes.first() else {
        return Ok(RopeFactors::default());
    };
    let factors = |name: &str| b.rope_factors(name, rope.n_dims / 2);
    let missing = |name: &str| ModelError::MissingTensor { name: name.into() };
    let all = factors("rope_freqs.weight")?;
    let short = factors("rope_factors_short.weight")?;
    let long = factors("rope_factors_long.weight")?;
    let short_long = match (short, long) {
        (Some(short), Some(long)) => Some((short, long)),
        (None, None) if rope.scaling != RopeScaling::Long => None,
        (Some(_), None) => return Err(missing("rope_factors_long.weight")),
        (None, _) => return Err(missing("rope_factors_short.weight")),
    };
    Ok(RopeFactors { all, short_long })
}
