//! What is recorded of an answer, to be learnt from.

use crate::serve::ids::Caller;
use crate::serve::learner::Learner;
use crate::serve::observe::log::HTTP;
use ruvllm::compute::PooledStates;
use ruvllm_learn::sona::Trajectory;
use std::sync::Arc;
use std::time::Instant;

/// A request whose answer is awaited to be recorded.
pub(crate) struct Recorder {
    learner: Arc<Learner>,
    begun: Instant,
    trajectory: Trajectory,
}

impl Recorder {
    /// For answer `i` to `prompt`.
    pub(crate) fn new(
        learner: &Arc<Learner>,
        caller: &Caller,
        user: Option<&str>,
        prompt: &[u32],
        i: usize,
    ) -> Recorder {
        let request_id = if i == 0 {
            caller.request.to_string()
        } else {
            format!("{}#{i}", caller.request)
        };
        let trajectory = Trajectory {
            session_id: user.unwrap_or(&caller.request).to_owned(),
            request_id,
            n_prompt: prompt.len(),
            tokens: prompt.to_vec(),
            ..Default::default()
        };
        Recorder {
            learner: Arc::clone(learner),
            begun: Instant::now(),
            trajectory,
        }
    }

    /// Another token of the answer.
    pub(crate) fn push(&mut self, token: u32) {
        self.trajectory.n_answer += 1;
        self.trajectory.tokens.push(token);
    }

    /// Records it; what fails is logged, as the answer is there.
    pub(crate) fn finish(self, pooled: PooledStates) {
        let Recorder {
            learner,
            begun,
            mut trajectory,
        } = self;
        trajectory.latency = begun.elapsed();
        (trajectory.query_embedding, trajectory.response_embedding) =
            (pooled.prompt, pooled.answer);
        tokio::task::spawn_blocking(move || {
            if let Err(error) = learner.sona.record(trajectory) {
                tracing::warn!(target: HTTP, %error, "a request was not recorded");
            }
        });
    }
}
