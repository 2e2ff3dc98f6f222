//! What a request asks for, and its answer, in the words of no API.

pub(super) mod answer;
pub(super) mod params;
pub(super) mod recorder;
pub(super) mod turn;
