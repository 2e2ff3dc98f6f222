//! Specification of a layer: a mixer, then a feed-forward layer.

use crate::layers::attention::spec::AttnSpec;
use crate::layers::compressed::spec::CompressedSpec;
use crate::layers::dense_ffn::spec::DenseSpec;
use crate::layers::moe::spec::MoeSpec;
use crate::layers::norm::spec::Norms;
use crate::layers::recurrent::spec::RecurrentSpec;

/// One layer: a mixer, then a feed-forward layer, each added to the residual stream.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct LayerSpec {
    /// Token mixer.
    pub mixer: Mixer,
    /// Whether a second attention, with heads like the mixer's, reads what an encoder left of
    /// another text, between mixer and feed-forward layer.
    pub cross: bool,
    /// Feed-forward layer.
    pub ffn: FfnSpec,
    /// Where norms are.
    pub norms: Norms,
    /// Epsilon of norms of outputs, if it is not the model's.
    pub post_norm_eps: Option<f32>,
    /// The matrices that have a bias.
    pub biases: Biases,
    /// Factor on the outputs of mixer and feed-forward layer before they are added to the residual
    /// stream; with [`Norms::OfStream`], on the stream to which they are added.
    pub residual_scale: f32,
    /// Factor on the residual stream after the layer.
    pub output_scale: OutputScale,
    /// Whether the embeddings, multiplied by a factor of the file, are added to the residual stream
    /// after the layer.
    pub embd_skip: bool,
    /// Whether it adds embeddings of several tokens to residual streams, see
    /// [`Hparams::ngrams`](crate::layers::hparams::Hparams::ngrams).
    pub ngrams: bool,
}

impl Default for LayerSpec {
    /// Norms before both parts, of which there are none.
    fn default() -> LayerSpec {
        LayerSpec {
            mixer: Mixer::None,
            cross: false,
            ffn: FfnSpec::None,
            norms: Norms::Before,
            post_norm_eps: None,
            biases: Biases::Optional,
            residual_scale: 1.0,
            output_scale: OutputScale::None,
            embd_skip: false,
            ngrams: false,
        }
    }
}

/// Factor on the residual stream after a layer.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub enum OutputScale {
    /// None.
    #[default]
    None,
    /// The file's.
    OfFile,
    /// A half.
    Half,
}

/// Matrices of a layer that have a bias in every file. Other biases are up to the file, but must be
/// the same in all layers with equal specifications.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Biases {
    /// None.
    #[default]
    Optional,
    /// Those of queries, keys and values.
    Qkv,
    /// All, except the matrices of a mixture.
    All,
    /// All, including those of a mixture.
    Everywhere,
}

/// Token mixer: the part of a layer in which tokens see each other.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub enum Mixer {
    /// Softmax attention over keys and values of earlier tokens.
    Attention(AttnSpec),
    /// A recurrence, whose state every token changes.
    Recurrent(RecurrentSpec),
    /// Both, of the same input; their outputs are added.
    Both(AttnSpec, RecurrentSpec),
    /// Attention to a window and to compressed blocks.
    Compressed(CompressedSpec),
    /// None: the layer is a feed-forward layer alone.
    #[default]
    None,
}

impl LayerSpec {
    /// Its attention, if it has one.
    pub fn attention(&self) -> Option<&AttnSpec> {
        match &self.mixer {
            Mixer::Attention(attn) | Mixer::Both(attn, _) => Some(attn),
            Mixer::Recurrent(_) | Mixer::Compressed(_) | Mixer::None => None,
        }
    }

    pub(crate) fn attention_mut(&mut self) -> Option<&mut AttnSpec> {
        match &mut self.mixer {
            Mixer::Attention(attn) | Mixer::Both(attn, _) => Some(attn),
            Mixer::Recurrent(_) | Mixer::Compressed(_) | Mixer::None => None,
        }
    }

    /// Its attention to compressed blocks, if it has one.
    pub fn compressed(&self) -> Option<&CompressedSpec> {
        match &self.mixer {
            Mixer::Compressed(spec) => Some(spec),
            _ => None,
        }
    }

    /// Its recurrent mixer, if it has one.
    pub fn recurrent(&self) -> Option<&RecurrentSpec> {
        match &self.mixer {
            Mixer::Recurrent(spec) | Mixer::Both(_, spec) => Some(spec),
            Mixer::Attention(_) | Mixer::Compressed(_) | Mixer::None => None,
        }
    }
}

/// Feed-forward layer.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub enum FfnSpec {
    /// The same weights for every token.
    Dense(DenseSpec),
    /// Mixture of experts.
    Moe(MoeSpec),
    /// Both, each with norms of its own on its input and output; their outputs are added.
    Both(DenseSpec, MoeSpec),
    /// Both, without norms of their own on their outputs, which are added.
    Beside(DenseSpec, MoeSpec, BesideSpec),
    /// None: the layer is a mixer alone.
    #[default]
    None,
}

/// How a dense layer and a mixture beside it are put together.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct BesideSpec {
    /// Whether the mixture reads the layer's input, before the mixer, through a norm of its own
    /// (Arctic).
    pub reads_input: bool,
    /// Factor on the sum of both outputs.
    pub scale: f32,
}

impl FfnSpec {
    /// Width of the widest hidden layer.
    pub fn n_ff(&self) -> usize {
        let of_mixture = |moe: &MoeSpec| {
            let shared = moe.shared.map_or(0, |shared| shared.n_ff);
            let adjugate = moe.adjugate.map_or(0, |adjugate| adjugate.n_ff);
            moe.n_ff.max(shared).max(adjugate)
        };
        match self {
            FfnSpec::Dense(ffn) => ffn.n_ff,
            FfnSpec::Moe(moe) => of_mixture(moe),
            FfnSpec::Both(ffn, moe) | FfnSpec::Beside(ffn, moe, _) => of_mixture(moe).max(ffn.n_ff),
            FfnSpec::None => 0,
        }
    }

    pub(crate) fn moe_mut(&mut self) -> Option<&mut MoeSpec> {
        match self {
            FfnSpec::Moe(moe) | FfnSpec::Both(_, moe) | FfnSpec::Beside(_, moe, _) => Some(moe),
            FfnSpec::Dense(_) | FfnSpec::None => None,
        }
    }

    /// The mixture of experts, if it has one.
    pub fn moe(&self) -> Option<&MoeSpec> {
        match self {
            FfnSpec::Moe(moe) | FfnSpec::Both(_, moe) | FfnSpec::Beside(_, moe, _) => Some(moe),
            FfnSpec::Dense(_) | FfnSpec::None => None,
        }
    }
}
