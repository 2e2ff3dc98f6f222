//! Layers of a file: their norms, mixer and feed-forward layer.

use crate::layers::altup::spec::StreamsSpec;
use crate::layers::altup::weights::{AltUp, Laurel};
use crate::layers::attention::spec::AttnSpec;
use crate::layers::attention::weights::Attn;
use crate::layers::hparams::Hparams;
use crate::layers::hyper::spec::HyperSpec;
use crate::layers::hyper::weights::HyperLayer;
use crate::layers::layer::spec::{FfnSpec, LayerSpec, Mixer, OutputScale};
use crate::layers::layer::weights::Layer;
use crate::layers::ngram::spec::NgramSpec;
use crate::layers::ngram::weights::Ngrams;
use crate::layers::norm::spec::Norms;
use crate::layers::per_layer_embedding::PerLayer;
use crate::layers::residual_attention::ResidualScores;
use crate::layers::switch::spec::SwitchSpec;
use crate::layers::switch::weights::{SwitchLayer, SwitchTerm};
use crate::model::ModelError;
use crate::model::binding::attention::{attention, cross};
use crate::model::binding::binder::Binder;
use crate::model::binding::compressed::compressed;
use crate::model::binding::connection;
use crate::model::binding::feed_forward::feed_forward;
use crate::model::binding::recurrent;

/// Places of norms under which the mixer's input has one.
const BEFORE_MIXER: &[Norms] = &[
    Norms::Before,
    Norms::BeforeAndLast,
    Norms::OfStream,
    Norms::Both,
    Norms::Shared,
    Norms::Parallel,
];
/// Those under which the feed-forward layer's input has one.
const BEFORE_FFN: &[Norms] = &[
    Norms::Before,
    Norms::BeforeAndLast,
    Norms::BeforeFfn,
    Norms::OfStream,
    Norms::Both,
    Norms::Parallel,
];
/// Those under which the output of a branch has one.
const BEHIND_BRANCH: &[Norms] = &[Norms::After, Norms::Both, Norms::Residual];

/// Layer `i`; `source` has the keys and values that it may share.
pub(super) fn layer(
    b: &Binder<'_>,
    h: &Hparams,
    spec: &LayerSpec,
    i: usize,
    source: Option<&Attn>,
) -> Result<Layer, ModelError> {
    let name = |part: &str| format!("{}blk.{}.{part}", h.prefix, i / h.n_part);
    let (has_mixer, has_ffn) = (spec.mixer != Mixer::None, spec.ffn != FfnSpec::None);
    let norm = |part: &str, is_there: bool, places: &[Norms]| {
        (is_there && places.contains(&spec.norms))
            .then(|| b.norm(&name(part), h))
            .transpose()
    };
    let names = NormNames::of(b, h, spec, i, &name);
    let attn = spec
        .attention()
        .map(|attn| attention(b, h, (attn, source), spec.biases, &name));
    let recurrent = spec
        .recurrent()
        .map(|recurrent| recurrent::bind(b, h.n_embd, recurrent, &name));
    Ok(Layer {
        attn_norm: norm(names.attn_norm, has_mixer, BEFORE_MIXER)?,
        attn: attn.transpose()?,
        recurrent: recurrent.transpose()?,
        compressed: spec
            .compressed()
            .map(|spec| compressed(b, h.n_embd, spec, &name))
            .transpose()?
            .map(Box::new),
        cross: spec
            .cross
            .then(|| cross(b, h, spec, &name))
            .transpose()?
            .flatten()
            .map(Box::new),
        post_attn_norm: norm(names.post_attn_norm, has_mixer, BEHIND_BRANCH)?,
        input_norm: (spec.norms == Norms::Residual && b.has(&name("attn_norm_2.weight")))
            .then(|| b.norm(&name("attn_norm_2"), h))
            .transpose()?,
        ffn_norm: norm(names.ffn_norm, has_ffn, BEFORE_FFN)?,
        ffn: feed_forward(b, h, spec, &name)?,
        post_ffn_norm: norm(names.post_ffn_norm, has_ffn, BEHIND_BRANCH)?,
        per_layer: h
            .per_layer_embd
            .map(|n| per_layer(b, h, n, &name))
            .transpose()?,
        alt_up: h
            .streams
            .map(|spec| alt_up(b, h, spec, &name))
            .transpose()?
            .map(Box::new),
        output_scale: match spec.output_scale {
            OutputScale::None => None,
            OutputScale::OfFile => Some(b.vector(&name("layer_output_scale.weight"), 1)?[0]),
            OutputScale::Half => Some(0.5),
        },
        hyper: h
            .hyper
            .map(|spec| hyper(b, h, spec, &name))
            .transpose()?
            .map(Box::new),
        ngrams: h
            .ngrams
            .as_ref()
            .filter(|_| spec.ngrams)
            .map(|spec| ngrams(b, h, spec, &name))
            .transpose()?
            .map(Box::new),
        residual_scores: h
            .checkpoints
            .map(|_| residual_scores(b, h.n_embd, &name))
            .transpose()?,
        switch: h
            .switch
            .as_ref()
            .map(|switch| adapters(b, h, (spec, switch), &name))
            .transpose()?
            .map(Box::new),
        embd_skip: spec
            .embd_skip
            .then(|| b.vector(&name("layer_output_scale.weight"), 1))
            .transpose()?
            .map(|factor| factor[0]),
    })
}

/// Names of a layer's norms in its file.
struct NormNames {
    attn_norm: &'static str,
    post_attn_norm: &'static str,
    ffn_norm: &'static str,
    post_ffn_norm: &'static str,
}

impl NormNames {
    /// Those of layer `i`, by what there is.
    fn of(
        b: &Binder<'_>,
        h: &Hparams,
        spec: &LayerSpec,
        i: usize,
        name: &dyn Fn(&str) -> String,
    ) -> NormNames {
        let has_mixer = spec.mixer != Mixer::None;
        // Some files name the norm before the feed-forward layer after the attention that precedes it.
        // In Falcon files the norm that both branches share is the feed-forward layer's, if
        // attention has one of its own.
        let (mut attn_norm, mut ffn_norm) = ("attn_norm", "ffn_norm");
        let (mut post_attn_norm, mut post_ffn_norm) = ("post_attention_norm", "post_ffw_norm");
        match spec.norms {
            Norms::Residual => {
                (post_attn_norm, post_ffn_norm) = ("attn_output_norm", "layer_output_norm")
            }
            Norms::Before if !has_mixer => ffn_norm = attn_norm,
            Norms::Before if !i.is_multiple_of(h.n_part) => attn_norm = "attn_norm_2",
            Norms::Before | Norms::BeforeAndLast => {
                let names = ["ffn_norm", "post_attention_norm", "attn_output_norm"];
                ffn_norm = names
                    .into_iter()
                    .find(|part| b.has(&name(&format!("{part}.weight"))))
                    .unwrap_or(ffn_norm);
            }
            // Grok's files.
            Norms::Both => {
                if b.has(&name("attn_output_norm.weight")) {
                    post_attn_norm = "attn_output_norm";
                }
                if b.has(&name("layer_output_norm.weight")) {
                    post_ffn_norm = "layer_output_norm";
                }
            }
            Norms::Parallel if b.has(&name("attn_norm_2.weight")) => {
                (attn_norm, ffn_norm) = ("attn_norm_2", "attn_norm")
            }
            _ => {}
        }
        NormNames {
            attn_norm,
            post_attn_norm,
            ffn_norm,
            post_ffn_norm,
        }
    }
}

/// Connections of several residual streams.
fn hyper(
    b: &Binder<'_>,
    h: &Hparams,
    spec: HyperSpec,
    name: &dyn Fn(&str) -> String,
) -> Result<HyperLayer, ModelError> {
    let sizes = (spec.n_weight(), spec.n_scale(), spec);
    Ok(HyperLayer {
        mixer: connection(b, h, &name("hc_attn"), sizes)?,
        ffn: connection(b, h, &name("hc_ffn"), sizes)?,
    })
}

/// What scores checkpoints of the residual stream.
fn residual_scores(
    b: &Binder<'_>,
    n_embd: usize,
    name: &dyn Fn(&str) -> String,
) -> Result<ResidualScores, ModelError> {
    Ok(ResidualScores {
        mixer: b.vector(&name("attn_res_score.weight"), n_embd)?,
        ffn: b.vector(&name("ffn_res_score.weight"), n_embd)?,
    })
}

/// Embeddings of several tokens.
fn ngrams(
    b: &Binder<'_>,
    h: &Hparams,
    spec: &NgramSpec,
    name: &dyn Fn(&str) -> String,
) -> Result<Ngrams, ModelError> {
    let n = h.hyper.map_or(0, |hyper| hyper.n_stream * h.n_embd);
    let linear =
        |part: &str, n_out: usize| b.fixed(|b| b.linear(&name(part), spec.n_embd(), n_out, false));
    let norm = |part: &str| b.vector(&name(part), n);
    let taps = name("ple_conv1d.weight");
    Ok(Ngrams {
        table: b.table("per_layer_token_embd.weight", spec.n_row_embd, spec.n_row)?,
        key: linear("ple_key", n)?,
        value: linear("ple_value", h.n_embd)?,
        key_norm: norm("ple_norm_key.weight")?,
        query_norm: norm("ple_norm_query.weight")?,
        conv_norm: norm("ple_norm_conv.weight")?,
        taps: b
            .values(&taps, &[spec.n_tap, n])?
            .ok_or(ModelError::MissingTensor { name: taps })?,
    })
}

/// Adapters in the file, of all matrices of a layer.
fn adapters(
    b: &Binder<'_>,
    h: &Hparams,
    (spec, switch): (&LayerSpec, &SwitchSpec),
    name: &dyn Fn(&str) -> String,
) -> Result<SwitchLayer, ModelError> {
    let (rank, n_slot) = (switch.rank, switch.n_slot());
    let term = |part: &str, n_in: usize, n_out: usize| {
        let stack = |factor: &str, n_in: usize, n_out: usize| {
            let name = name(&format!("{part}.lora_{factor}"));
            b.fixed(|b| b.weight(&name, n_in, n_out, n_slot))
        };
        Ok::<_, ModelError>(SwitchTerm {
            a: stack("a", n_in, rank)?,
            b: stack("b", rank, n_out)?,
        })
    };
    let (n, n_ff) = (h.n_embd, spec.ffn.n_ff());
    let sizes = |attn: &AttnSpec| (attn.n_q(), attn.n_k(), attn.n_v(), attn.n_out());
    let (n_q, n_k, n_v, n_out) = spec.attention().map(sizes).unwrap_or_default();
    Ok(SwitchLayer {
        q: term("attn_q", n, n_q)?,
        k: term("attn_k", n, n_k)?,
        v: term("attn_v", n, n_v)?,
        output: term("attn_output", n_out, n)?,
        gate: term("ffn_gate", n, n_ff)?,
        up: term("ffn_up", n, n_ff)?,
        down: term("ffn_down", n_ff, n)?,
    })
}

fn alt_up(
    b: &Binder<'_>,
    h: &Hparams,
    StreamsSpec {
        n_stream: n,
        laurel_rank: rank,
    }: StreamsSpec,
    name: &dyn Fn(&str) -> String,
) -> Result<AltUp, ModelError> {
    let table = |part: &str, n_out: usize| {
        let name = name(part);
        b.values(&name, &[n, n_out])?
            .ok_or(ModelError::MissingTensor { name })
    };
    Ok(AltUp {
        norm: b.norm(&name("altup_router_norm"), h)?,
        router: b.linear(&name("altup_router"), h.n_embd, n, false)?,
        predict: table("altup_predict_coef.weight", n * n)?,
        correct: table("altup_correct_coef.weight", n)?,
        scale: b.vector(&name("altup_correct_scale.weight"), h.n_embd)?,
        laurel: Laurel {
            left: b.linear(&name("laurel_l"), h.n_embd, rank, false)?,
            right: b.linear(&name("laurel_r"), rank, h.n_embd, false)?,
            norm: b.norm(&name("laurel_post_norm"), h)?,
        },
    })
}

fn per_layer(
    b: &Binder<'_>,
    h: &Hparams,
    n: usize,
    name: &dyn Fn(&str) -> String,
) -> Result<PerLayer, ModelError> {
    Ok(PerLayer {
        gate: b.linear(&name("inp_gate"), h.n_embd, n, false)?,
        proj: b.linear(&name("proj"), n, h.n_embd, false)?,
        norm: b.norm(&name("post_norm"), h)?,
    })
}
