//! Options of learning that goes on by itself.

use crate::learn::LearnerOptions;
use crate::sona::folder::FolderOptions;

/// Options of a [`Sona`](super::Sona); begins with [`Sona::builder`](super::Sona::builder).
#[derive(Clone, Debug)]
pub struct SonaBuilder {
    pub(super) tenant: String,
    pub(super) keep_text: bool,
    pub(super) background_interval_ms: u64,
    pub(super) background_min_samples: usize,
    pub(super) max_pending_samples: usize,
    pub(super) quality_threshold: f32,
    pub(super) deep_trigger_threshold: f64,
    pub(super) instant_lr: Option<f32>,
    pub(super) inner_layers: bool,
    pub(super) mixture: Option<bool>,
    pub(super) folder: FolderOptions,
    pub(super) learner: LearnerOptions,
}

impl SonaBuilder {
    /// Whom the folder belongs to. Default: nobody.
    #[must_use]
    pub fn tenant(mut self, tenant: impl Into<String>) -> Self {
        self.tenant = tenant.into();
        self
    }

    /// Whether tokens of requests are stored, so that others can be learnt again after a session is
    /// forgotten, and adapters trained. Default: no.
    #[must_use]
    pub fn keep_text(mut self, keep: bool) -> Self {
        self.keep_text = keep;
        self
    }

    /// Milliseconds between two looks of the background at what is pending. Default 100.
    #[must_use]
    pub fn background_interval_ms(mut self, ms: u64) -> Self {
        self.background_interval_ms = ms;
        self
    }

    /// Trajectories from which on the background learns. Default 10.
    #[must_use]
    pub fn background_min_samples(mut self, n: usize) -> Self {
        self.background_min_samples = n;
        self
    }

    /// Most trajectories that wait to be learnt: when there are so many, the background does not
    /// rest until they are learnt, and for each further one the oldest is not learnt. All that
    /// wait have at most four million tokens. Default 1000.
    #[must_use]
    pub fn max_pending_samples(mut self, n: usize) -> Self {
        self.max_pending_samples = n;
        self
    }

    /// The rating from which on an answer is learnt; of a request with a worse one nothing is.
    /// Default 0.5.
    #[must_use]
    pub fn quality_threshold(mut self, threshold: f32) -> Self {
        self.quality_threshold = threshold;
        self
    }

    /// The sum of ratings from which on [`Sona::is_training_due`](super::Sona::is_training_due). Default 100.
    #[must_use]
    pub fn deep_trigger_threshold(mut self, threshold: f64) -> Self {
        self.deep_trigger_threshold = threshold;
        self
    }

    /// Factor on the steps of what is learnt from now on. Default: what the folder's learner has,
    /// at first 1.
    #[must_use]
    pub fn instant_lr(mut self, rate: f32) -> Self {
        self.instant_lr = Some(rate);
        self
    }

    /// Whether inner layers are adapted, too, by backpropagation: seven more prefills of what is
    /// learnt, in the background. It takes control text of at least 1,024 tokens. Default: yes.
    #[must_use]
    pub fn inner_layers(mut self, on: bool) -> Self {
        self.inner_layers = on;
        self
    }

    /// Whether text is generated with the mixture of all experts, by which what is learnt is then
    /// judged. Default: as the folder's learner has it, at first no.
    #[must_use]
    pub fn mixture(mut self, on: bool) -> Self {
        self.mixture = Some(on);
        self
    }

    /// Options of the learner, where a folder has none yet.
    #[must_use]
    pub fn learner(mut self, options: LearnerOptions) -> Self {
        self.learner = options;
        self
    }

    /// What the folder may hold.
    #[must_use]
    pub fn folder(mut self, options: FolderOptions) -> Self {
        self.folder = options;
        self
    }
}

impl Default for SonaBuilder {
    fn default() -> Self {
        SonaBuilder {
            tenant: String::new(),
            keep_text: false,
            background_interval_ms: 100,
            background_min_samples: 10,
            max_pending_samples: 1000,
            quality_threshold: 0.5,
            deep_trigger_threshold: 100.0,
            instant_lr: None,
            inner_layers: true,
            mixture: None,
            folder: FolderOptions::default(),
            learner: LearnerOptions::default(),
        }
    }
}
