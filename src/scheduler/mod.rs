//! Many requests at a time.

pub(crate) mod admission;
pub(crate) mod error;
pub(crate) mod live;
pub(crate) mod pacing;
pub(crate) mod request;
pub(crate) mod schedule;
mod sharing;
mod shifting;
pub(crate) mod stream;
pub(crate) mod thread;

pub use admission::ScheduleOptions;
pub use error::ScheduleError;
pub use request::{Observer, Request, RequestId};
pub use schedule::Schedule;
pub use stream::Stream;
pub use thread::Scheduler;
