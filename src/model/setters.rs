//! What a family says of its hyper-parameters beyond those of llama.

use crate::arch::MAX_HEAD_DIM;
use crate::layers::attention::latent::spec::LatentSpec;
use crate::layers::attention::spec::Temperature;
use crate::layers::hparams::Hparams;
use crate::layers::layer::spec::{Biases, LayerSpec, Mixer};
use crate::layers::norm::spec::Norms;
use crate::layers::recurrent::spec::RecurrentSpec;
use crate::layers::rope::spec::{Rope, RopeId, RopeScaling};
use crate::model::ModelError;
use crate::model::keys::Keys;

impl Hparams {
    /// Sets the placement of norms in all layers.
    pub(crate) fn set_norms(&mut self, norms: Norms) {
        self.layers.iter_mut().for_each(|layer| layer.norms = norms);
    }

    /// With the sections of pairs by which images turn, where the file has some.
    pub(crate) fn with_sections(
        mut self,
        keys: &Keys<'_>,
        interleaved: bool,
    ) -> Result<Hparams, ModelError> {
        let sections = Rope::sections(keys, interleaved)?;
        self.ropes
            .iter_mut()
            .for_each(|rope| rope.sections = sections);
        Ok(self)
    }

    /// Sets which matrices have a bias, in all layers.
    pub(crate) fn set_biases(&mut self, biases: Biases) {
        self.layers
            .iter_mut()
            .for_each(|layer| layer.biases = biases);
    }

    /// Sets the layers' sliding windows: `default` positions unless the file says otherwise; 0 in
    /// the file means none. Every `pattern`-th layer sees everything, or no layer does if that
    /// is 0, unless the file gives another pattern.
    pub(crate) fn set_windows(
        &mut self,
        keys: &Keys<'_>,
        default: Option<usize>,
        pattern: usize,
    ) -> Result<(), ModelError> {
        let windows = keys.windows(default, pattern)?;
        let layers = self.layers.iter_mut().zip(windows);
        layers
            .filter_map(|(layer, window)| Some((layer.attention_mut()?, window)))
            .for_each(|(attn, window)| {
                attn.window = window;
            });
        Ok(())
    }

    /// Sets the bound on queries, keys and values, if the file has one.
    pub(crate) fn set_clip(&mut self, keys: &Keys<'_>) -> Result<(), ModelError> {
        // 0 in a file means no bound.
        let clip = keys
            .number("attention.clamp_kqv")?
            .filter(|&clip| clip > 0.0);
        self.attention_mut().for_each(|attn| attn.clip = clip);
        Ok(())
    }

    /// Gives attention ALiBi instead of a rope.
    pub(crate) fn set_alibi(&mut self, max_bias: f32) {
        self.attention_mut()
            .for_each(|attn| (attn.rope, attn.alibi) = (None, Some(max_bias)));
    }

    /// Sets the attention temperature, if the file has one; `default` is scale and length if the
    /// file lacks them.
    pub(crate) fn set_temperature(
        &mut self,
        keys: &Keys<'_>,
        default: (f32, usize),
        offset: usize,
    ) -> Result<(), ModelError> {
        let length = keys
            .opt_count("attention.temperature_length", 1 << 28)?
            .unwrap_or(default.1);
        let scale = keys
            .number("attention.temperature_scale")?
            .unwrap_or(default.0);
        let temperature = (scale != 0.0).then_some(Temperature {
            scale,
            length,
            offset,
        });
        self.attention_mut()
            .for_each(|attn| attn.temperature = temperature);
        Ok(())
    }

    /// Makes attention latent (MLA), with the sizes and tensors of the file.
    pub(crate) fn set_latent(&mut self, keys: &Keys<'_>) -> Result<(), ModelError> {
        let q_rank = keys.opt_count("attention.q_lora_rank", 1 << 17)?;
        let kv_rank = keys.count("attention.kv_lora_rank", MAX_HEAD_DIM)?;
        let Some(n_rot) = self.ropes.first().map(|rope| rope.n_dims) else {
            return Err(ModelError::Inconsistent {
                what: "latent attention in no layer".into(),
            });
        };
        let absorbed = keys.has_part("attn_k_b.weight");
        let head_dim = match keys.opt_count("attention.key_length_mla", MAX_HEAD_DIM)? {
            None if absorbed => return Err(keys.missing("attention.key_length_mla")),
            None => self.attention().next().map_or(0, |attn| attn.head_dim),
            Some(n) => n,
        };
        let head_dim_v = match keys.opt_count("attention.value_length_mla", MAX_HEAD_DIM)? {
            None if absorbed => return Err(keys.missing("attention.value_length_mla")),
            None => keys.opt_count("attention.value_length", MAX_HEAD_DIM)?,
            n => n,
        };
        if n_rot >= head_dim || kv_rank + n_rot > MAX_HEAD_DIM {
            return Err(ModelError::Inconsistent {
                what: format!(
                    "latent attention with {n_rot} of {head_dim} dimensions rotated, and a latent of {kv_rank}"
                ),
            });
        }
        let n_embd = self.n_embd;
        for attn in self.attention_mut() {
            let head_dim_v = head_dim_v.unwrap_or((n_embd / attn.n_head).clamp(1, MAX_HEAD_DIM));
            attn.latent = Some(LatentSpec {
                q_rank,
                kv_rank,
                n_plain: head_dim - n_rot,
                n_rot,
                head_dim_v,
                absorbed,
                rot_norm: false,
            });
            (attn.n_head_kv, attn.head_dim, attn.head_dim_v) = if absorbed {
                (1, kv_rank + n_rot, kv_rank)
            } else {
                (attn.n_head, head_dim, head_dim_v)
            };
            attn.scale = 1.0 / (head_dim as f32).sqrt();
        }
        Ok(())
    }

    /// Makes each of the last `n` layers read the keys and values of the last layer before them of
    /// its kind, with a window or without.
    pub(crate) fn share_kv(&mut self, n: usize) -> Result<(), ModelError> {
        let windows: Vec<bool> = self.attention().map(|attn| attn.window.is_some()).collect();
        let own = self.n_layer.saturating_sub(n);
        for i in own..self.n_layer {
            let source = (0..own).rev().find(|&source| windows[source] == windows[i]);
            self.kv_layers[i] = source.ok_or_else(|| ModelError::Inconsistent {
                what: format!(
                    "layer {i} shares keys and values, but no layer of its kind has some"
                ),
            })?;
        }
        self.attention_mut()
            .skip(own)
            .for_each(|attn| attn.shares_kv = true);
        Ok(())
    }

    /// Makes the layers run `n` times, with keys and values of their own; between two loops the
    /// residual stream goes through the last norm if `normed`.
    pub(crate) fn set_loops(&mut self, n: usize, normed: bool) {
        let mut inner = self.layers.clone();
        if let Some(last) = inner.last_mut().filter(|_| normed) {
            last.norms = Norms::BeforeAndLast;
        }
        let last = std::mem::take(&mut self.layers);
        self.layers = (1..n).flat_map(|_| inner.clone()).collect();
        self.layers.extend(last);
        (self.n_layer, self.n_loop) = (self.layers.len(), n);
        self.kv_layers = (0..self.n_layer).collect();
    }

    /// Puts a layer with `mixer` alone behind each layer: the second half of a block of the file.
    pub(crate) fn split_blocks(&mut self, mixer: &RecurrentSpec) {
        let second = |layer: &LayerSpec| LayerSpec {
            mixer: Mixer::Recurrent(mixer.clone()),
            ..layer.clone()
        };
        self.layers = self
            .layers
            .iter()
            .flat_map(|layer| [layer.clone(), second(layer)])
            .collect();
        self.kv_layers = vec![0; self.layers.len()];
        (self.n_layer, self.n_part) = (self.layers.len(), 2);
    }

    /// Adds attention sinks to the layers that have the tensor.
    pub(crate) fn set_sinks(&mut self, keys: &Keys<'_>) {
        for (i, layer) in self.layers.iter_mut().enumerate() {
            if let Some(attn) = layer.attention_mut() {
                attn.sinks = keys.has_in_layer(i, "attn_sinks.weight");
            }
        }
    }

    /// Removes the rope from layers without a window.
    pub(crate) fn rotate_in_windows_alone(&mut self) {
        self.attention_mut()
            .filter(|attn| attn.window.is_none())
            .for_each(|attn| attn.rope = None);
    }

    /// Gives layers with a window a rope of their own by the keys `rope.freq_base_swa` and
    /// `rope.dimension_count_swa`, `n_dims` dimensions unless the file says otherwise, without
    /// scaling and factors of the file.
    pub(crate) fn set_window_rope_of(
        &mut self,
        keys: &Keys<'_>,
        n_dims: usize,
    ) -> Result<(), ModelError> {
        let theta = keys.positive("rope.freq_base_swa")?;
        let n_dims = keys
            .opt_count("rope.dimension_count_swa", MAX_HEAD_DIM)?
            .unwrap_or(n_dims);
        let windowed = self.attention().find(|attn| attn.window.is_some());
        let Some(head_dim) = windowed.map(|attn| attn.head_dim) else {
            return Ok(());
        };
        if n_dims % 2 != 0 || n_dims > head_dim {
            return Err(ModelError::Inconsistent {
                what: format!(
                    "{}.rope.dimension_count_swa {n_dims} of heads of {head_dim}",
                    keys.arch
                ),
            });
        }
        self.set_window_rope(theta.unwrap_or(self.ropes[0].theta));
        if let Some(rope) = self.ropes.last_mut() {
            (rope.n_dims, rope.factors) = (n_dims, false);
        }
        Ok(())
    }

    /// Sets which attention is gated: by the rows of its gate's matrix, each head or each value.
    pub(crate) fn set_gates(&mut self, keys: &Keys<'_>) {
        for (i, layer) in self.layers.iter_mut().enumerate() {
            if let Some(attn) = layer.attention_mut() {
                let n_gate = keys.n_out(&format!("blk.{i}.attn_gate.weight"));
                attn.gated = true;
                attn.gate_by_head = n_gate == Some(attn.n_head);
            }
        }
    }

    /// Gives layers with a window a rope of their own, with base `theta` and no scaling.
    pub(crate) fn set_window_rope(&mut self, theta: f32) {
        let id = RopeId(self.ropes.len());
        self.ropes.push(Rope {
            theta,
            scaling: RopeScaling::None,
            attn_factor: 1.0,
            ..self.ropes[0]
        });
        self.attention_mut()
            .filter(|attn| attn.window.is_some())
            .for_each(|attn| attn.rope = Some(id));
    }
}
