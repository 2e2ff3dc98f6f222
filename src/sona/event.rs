//! What happened to what is learnt.

use super::record::{Decoder, Encoder};

/// Kinds of [`Event`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// Control text was read.
    Calibrated,
    /// Trajectories were learnt, and took effect as a new version.
    Accepted,
    /// Trajectories were learnt, without a change of what is predicted, or without text to judge it on.
    Unchanged,
    /// What was learnt made text that was kept from it less likely, or broke the bound, and was thrown away.
    Refused,
    /// The owner went back to an earlier version.
    RolledBack,
    /// The owner brought a version.
    Imported,
    /// The owner asked to forget a session.
    Forget,
    /// All that was made of it is gone.
    Forgotten,
    /// An adapter was trained on the trajectories (the deep loop).
    Trained,
}

impl EventKind {
    /// All kinds with their names.
    pub const ALL: [(&'static str, EventKind); 9] = [
        ("calibrated", EventKind::Calibrated),
        ("accepted", EventKind::Accepted),
        ("unchanged", EventKind::Unchanged),
        ("refused", EventKind::Refused),
        ("rolled-back", EventKind::RolledBack),
        ("imported", EventKind::Imported),
        ("forget", EventKind::Forget),
        ("forgotten", EventKind::Forgotten),
        ("trained", EventKind::Trained),
    ];

    /// Whether a version took effect by it.
    pub(super) fn is_start(self) -> bool {
        use EventKind::*;
        matches!(self, Calibrated | Accepted | RolledBack | Imported | Forgotten)
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(_, kind)| *kind == self).map_or("", |(name, _)| name)
    }
}

/// One change, or attempt at one, of what is learnt.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Event {
    /// What happened.
    pub kind: EventKind,
    /// Milliseconds since 1970.
    pub timestamp: u64,
    /// The version in effect afterwards; 0 is the model alone.
    pub version: u64,
    /// Trajectories up to this number have been learnt, or passed over.
    pub through: u64,
    /// Trajectories that were learnt, and tokens of them.
    pub n_learnt: [u64; 2],
    /// Tokens of the trajectories that were kept to judge by, and their mean loss in nats with what was in effect before and
    /// with what was learnt.
    pub judged: (u64, f64, f64),
    /// Mean divergence from the model on control text of what was learnt, in nats; 0 without control text.
    pub divergence: f64,
    /// Hashes of the names of the sessions that were learnt from, or that is to be forgotten.
    pub(super) sessions: Vec<u64>,
}

impl Event {
    pub(super) fn new(kind: EventKind, version: u64, through: u64) -> Event {
        Event {
            kind,
            timestamp: crate::clock::unix_millis(),
            version,
            through,
            n_learnt: [0; 2],
            judged: (0, 0.0, 0.0),
            divergence: 0.0,
            sessions: Vec::new(),
        }
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let mut e = Encoder::default();
        let kind = EventKind::ALL.iter().position(|(_, kind)| *kind == self.kind).unwrap_or_default();
        e.u8(kind as u8).u64(self.timestamp).u64(self.version).u64(self.through);
        e.u64(self.n_learnt[0]).u64(self.n_learnt[1]);
        e.u64(self.judged.0).f64(self.judged.1).f64(self.judged.2).f64(self.divergence).list(&self.sessions);
        e.0
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Event, String> {
        let mut d = Decoder(bytes);
        let kind = d.u8()?;
        let (_, kind) =
            EventKind::ALL.get(usize::from(kind)).ok_or_else(|| format!("an event is of the unknown kind {kind}"))?;
        let event = Event {
            kind: *kind,
            timestamp: d.u64()?,
            version: d.u64()?,
            through: d.u64()?,
            n_learnt: [d.u64()?, d.u64()?],
            judged: (d.u64()?, d.f64()?, d.f64()?),
            divergence: d.f64()?,
            sessions: d.list()?,
        };
        d.end()?;
        Ok(event)
    }
}
