//! What a model takes of this machine's memory, as `inspect` and `doctor` tell it.

#[cfg(feature = "vision")]
use super::Failure;
use super::size::size;
use ruvllm::Model;
use ruvllm::SessionOptions;
use ruvllm::engine::{CacheMode, DrafterMemory, MemoryPlan, PlanOptions, Recommendation};
use ruvllm::lora::Adapter;
#[cfg(feature = "vision")]
use ruvllm::vision::{Image, ImageOptions, Projector};
use ruvllm::{SessionError, SystemMemory};
use ruvllm_learn::LearnerOptions;
use serde_json::{Map, Value, json};
use std::borrow::Cow;
use std::sync::Arc;

/// Nine tenths of what can be had, where the system tells.
pub(crate) fn to_fill() -> Option<u64> {
    Some(SystemMemory::now()?.available / 10 * 9)
}

/// What a session takes unless told otherwise, and what is recommended here; nothing where that is
/// not known, or where nothing fits.
pub(crate) struct Report {
    plan: MemoryPlan,
    /// What some uses add: a name, what for, and bytes.
    besides: Vec<Besides>,
    /// With the bytes that it was to fit into.
    recommended: Option<(Option<Recommendation>, u64)>,
}

impl Report {
    pub(crate) fn of(model: &Model) -> Result<Report, SessionError> {
        let options = PlanOptions::default();
        let recommended = match to_fill() {
            Some(bytes) => Some((model.recommend(&options, bytes)?, bytes)),
            None => None,
        };
        Ok(Report {
            plan: model.memory_plan(&options)?,
            besides: besides(model)?,
            recommended,
        })
    }

    /// Adds what a picture takes that `projector` reads.
    #[cfg(feature = "vision")]
    pub(crate) fn add_images(
        &mut self,
        model: &Model,
        projector: &Projector,
        options: ImageOptions,
    ) -> Result<(), Failure> {
        const SIDE: u32 = 1024;
        let picture = Image::rgb8(SIDE, SIDE, &vec![255; (3 * SIDE * SIDE) as usize])?;
        let n_threads = ruvllm::engine::default_threads();
        let of_image = projector.memory(&picture, options, n_threads)?;
        let session = SessionOptions {
            n_ctx: Some(of_image.n_tokens),
            ..Default::default()
        };
        let kv = model.memory_plan(&session.into())?.kv;
        let (kind, n) = (projector.kind(), of_image.n_tokens);
        self.besides.extend([
            (
                "projector",
                format!("for the weights of the projector ({kind})").into(),
                of_image.weights,
            ),
            (
                "image_encoder",
                format!("to encode a picture of {SIDE} × {SIDE} pixels").into(),
                of_image.encoder,
            ),
            (
                "image_tokens",
                format!("for embeddings, keys and values of its {n} tokens").into(),
                of_image.embeddings + kv,
            ),
        ]);
        Ok(())
    }

    /// Adds what a drafter takes.
    pub(crate) fn add_drafter(&mut self, drafter: &DrafterMemory) {
        let (n_ctx, n_batch) = (self.plan.n_ctx, SessionOptions::default().n_batch);
        let of_text = format!("for what a drafter keeps of a text of {n_ctx} tokens");
        self.besides.extend([
            (
                "drafter",
                "for what all texts share of a drafter, its weights above all".into(),
                drafter.shared(n_ctx),
            ),
            (
                "drafter_text",
                of_text.into(),
                drafter.of_text(n_ctx, n_batch),
            ),
        ]);
    }

    /// Of a plan alone.
    pub(crate) fn of_plan(plan: MemoryPlan) -> Report {
        Report {
            plan,
            besides: Vec::new(),
            recommended: None,
        }
    }

    /// Labels and texts of lines.
    pub(crate) fn lines(&self) -> Vec<(&'static str, String)> {
        let MemoryPlan {
            n_ctx,
            weights,
            weights_copy,
            kv,
            buffers,
            rest,
            vocabulary,
            ..
        } = self.plan;
        let mut lines = vec![(
            "memory",
            format!(
                "{} in all: {} for weights, {} for the vocabulary, {} for keys and values of {n_ctx} tokens, {} for buffers and logits",
                size(self.plan.needed()),
                size(weights + weights_copy),
                size(vocabulary),
                size(kv),
                size(buffers + rest)
            ),
        )];
        if !self.besides.is_empty() {
            let all = self
                .besides
                .iter()
                .map(|(_, what, bytes)| format!("{} {what}", size(*bytes)));
            lines.push(("optional", all.collect::<Vec<_>>().join(", ")));
        }
        match &self.recommended {
            None => {}
            Some((None, bytes)) => {
                lines.push((
                    "recommended",
                    format!(
                        "a smaller model: {} of memory can be had here",
                        size(*bytes)
                    ),
                ));
            }
            Some((
                Some(Recommendation {
                    session,
                    n_threads,
                    plan,
                    ..
                }),
                bytes,
            )) => {
                let (n_ctx, policy) = (plan.n_ctx, session.kv_policy());
                let flags = format!(
                    "-c {n_ctx} -ctk {} -ctv {} -t {n_threads}",
                    policy.k, policy.v
                );
                lines.push((
                    "recommended",
                    format!("{flags} ({} of {})", size(plan.needed()), size(*bytes)),
                ));
            }
        }
        lines
    }

    pub(crate) fn json(&self) -> Value {
        let MemoryPlan {
            n_ctx,
            weights,
            weights_copy,
            kv,
            buffers,
            rest,
            vocabulary,
            ..
        } = self.plan;
        let recommended = self.recommended.as_ref().and_then(|(found, bytes)| {
            let Recommendation {
                session,
                n_threads,
                plan,
                ..
            } = found.as_ref()?;
            let policy = session.kv_policy();
            Some(json!({
                "n_ctx": plan.n_ctx,
                "cache_type_k": policy.k.name(),
                "cache_type_v": policy.v.name(),
                "threads": n_threads,
                "total": plan.needed(),
                "of": bytes,
            }))
        });
        let besides: Map<_, _> = self
            .besides
            .iter()
            .map(|(name, _, bytes)| ((*name).into(), (*bytes).into()))
            .collect();
        json!({
            "besides": besides,
            "n_ctx": n_ctx,
            "weights": weights + weights_copy,
            "vocabulary": vocabulary,
            "kv_cache": kv,
            "buffers": buffers,
            "rest": rest,
            "total": self.plan.needed(),
            "recommended": recommended,
        })
    }
}

/// A name, a text for people, and bytes.
type Besides = (&'static str, Cow<'static, str>, u64);

/// What a full prefix cache takes, which gives way where memory is limited, a learner, and training
/// of an adapter as PEFT makes it unless told otherwise, of rank 8 on queries and values.
fn besides(model: &Model) -> Result<Vec<Besides>, SessionError> {
    let session = SessionOptions {
        prefix: CacheMode::On.into(),
        ..Default::default()
    };
    let adapter = Adapter::zeros(model, 8, 1, |site| {
        matches!(site.part(), "attn_q" | "attn_v")
    });
    let adapters = adapter.into_iter().map(Arc::new).collect();
    let options = PlanOptions {
        n_gradient: session.n_batch,
        has_divergence: true,
        adapters,
        ..session.clone().into()
    };
    let trained = model.memory_plan(&options)?;
    let learner =
        LearnerOptions::default().bytes(model.hparams(), session.n_batch.min(trained.n_ctx));
    let bare = model.memory_plan(&session.into())?;
    let mut besides = vec![
        (
            "prefix_cache",
            "for a full prefix cache (at most)".into(),
            bare.prefixes,
        ),
        ("learner", "to learn while running".into(), learner),
    ];
    if trained.gradients > 0 {
        besides.push((
            "training",
            "to train an adapter".into(),
            trained.needed() - bare.needed(),
        ));
    }
    Ok(besides)
}
