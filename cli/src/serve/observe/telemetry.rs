//! What the scheduler tells of requests, handed on to metrics, log, audit log and watchdog.

use crate::serve::observe::audit_log::AuditLog;
use crate::serve::observe::log::SCHEDULE;
use crate::serve::observe::metrics::Metrics;
use ruvllm::Finish;
use ruvllm::scheduler::ScheduleError;
use ruvllm::scheduler::{Observer, RequestId};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tracing::{debug, warn};

/// The scheduler's observer.
pub(crate) struct Telemetry {
    pub(crate) metrics: Metrics,
    pub(crate) audit_log: Option<AuditLog>,
    pub(crate) watchdog: Watchdog,
}

impl Observer for Telemetry {
    fn step_begins(&self) {
        self.watchdog.begins();
    }

    fn step_ends(&self) {
        self.watchdog.ends();
    }

    fn queued(&self, id: RequestId, n_prompt: usize) {
        debug!(target: SCHEDULE, id = id.0, n_prompt, "queued");
        self.metrics.queued(id, n_prompt);
        self.audit_log
            .iter()
            .for_each(|audit_log| audit_log.queued(id, n_prompt));
    }

    fn admitted(&self, id: RequestId) {
        debug!(target: SCHEDULE, id = id.0, "admitted");
        self.metrics.admitted(id);
        self.audit_log
            .iter()
            .for_each(|audit_log| audit_log.admitted(id));
    }

    fn first_token(&self, id: RequestId) {
        debug!(target: SCHEDULE, id = id.0, "first token");
    }

    fn preempted(&self, id: RequestId) {
        debug!(target: SCHEDULE, id = id.0, "preempted");
        self.metrics.preempted(id);
        self.audit_log
            .iter()
            .for_each(|audit_log| audit_log.preempted(id));
    }

    fn ended(&self, id: RequestId, outcome: Result<&Finish, &ScheduleError>) {
        match outcome {
            Ok(finish) => {
                let (reason, n_generated) =
                    (crate::io::reason_name(finish.reason), finish.n_generated);
                debug!(target: SCHEDULE, id = id.0, reason, n_generated, "ended");
            }
            Err(error) => warn!(target: SCHEDULE, id = id.0, %error, "failed"),
        }
        self.metrics.ended(id, outcome);
        self.audit_log
            .iter()
            .for_each(|audit_log| audit_log.ended(id, outcome));
    }
}

/// Notices that the scheduler no longer goes on: a pass that takes too long, or a thread that ended
/// within one. A scheduler that has nothing to do, or waits for readers, is in no step.
#[derive(Clone)]
pub(crate) struct Watchdog {
    limit: Duration,
    start: Instant,
    /// When the step that is computed began, in microseconds from `start`; 0 between steps.
    begun: Arc<AtomicU64>,
}

impl Watchdog {
    pub(crate) fn new(limit: Duration) -> Watchdog {
        Watchdog {
            limit,
            start: Instant::now(),
            begun: Arc::default(),
        }
    }

    fn begins(&self) {
        self.begun.store(
            self.start.elapsed().as_micros().max(1) as u64,
            Ordering::Relaxed,
        );
    }

    fn ends(&self) {
        self.begun.store(0, Ordering::Relaxed);
    }

    /// For how long nothing went on, if that is too long.
    pub(crate) fn stuck(&self) -> Option<Duration> {
        let begun = Some(self.begun.load(Ordering::Relaxed)).filter(|&begun| begun > 0)?;
        let time = self
            .start
            .elapsed()
            .saturating_sub(Duration::from_micros(begun));
        Some(time).filter(|&time| time >= self.limit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_step_that_lasts_is_stuck() {
        let dog = Watchdog::new(Duration::from_millis(20));
        std::thread::sleep(Duration::from_millis(30));
        assert_eq!(dog.stuck(), None, "there is no step");
        dog.begins();
        assert_eq!(dog.stuck(), None, "it has just begun");
        std::thread::sleep(Duration::from_millis(30));
        assert!(
            dog.stuck()
                .is_some_and(|time| time >= Duration::from_millis(20))
        );
        dog.begins();
        assert_eq!(dog.stuck(), None, "another one");
        std::thread::sleep(Duration::from_millis(30));
        dog.ends();
        assert_eq!(dog.stuck(), None, "it has ended");
    }
}
