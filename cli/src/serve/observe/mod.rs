//! What is told of requests: metrics, log, audit log.

pub(super) mod audit_log;
pub(super) mod log;
pub(super) mod metrics;
pub(super) mod telemetry;
