//! What HTTP brings and takes, whatever is asked for.

pub(super) mod budget;
pub(super) mod cors;
pub(super) mod dialect;
pub(super) mod error;
pub(super) mod fields;
pub(super) mod guard;
pub(super) mod ignored;
pub(super) mod images;
pub(super) mod page;
pub(super) mod remote;
pub(super) mod response;
pub(super) mod sending;
pub(super) mod socket;
#[cfg(all(feature = "tls", not(any(windows, target_vendor = "apple"))))]
pub(super) mod tls;
