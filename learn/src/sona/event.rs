//! What happened to what is learnt.

use crate::sona::record::{Decoder, Encoder};

/// Stands for all sessions, where there are too many to name each.
pub(super) const ANY_SESSION: u64 = 0;

/// Sessions that a summary names at most.
const MAX_SESSIONS: usize = 1 << 14;

/// Kinds of [`Event`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// Control text was read.
    Calibrated,
    /// Trajectories were learnt, and took effect as a new version.
    Accepted,
    /// Trajectories were learnt, without a change of what is predicted, or without text to judge it
    /// on.
    Unchanged,
    /// What was learnt made text that was kept from it less likely, or broke the bound, and was
    /// thrown away.
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
    /// Stands for several old events, of which the numbers are sums.
    Summary,
}

impl EventKind {
    /// All kinds with their names.
    pub const ALL: [(&'static str, EventKind); 10] = [
        ("calibrated", EventKind::Calibrated),
        ("accepted", EventKind::Accepted),
        ("unchanged", EventKind::Unchanged),
        ("refused", EventKind::Refused),
        ("rolled-back", EventKind::RolledBack),
        ("imported", EventKind::Imported),
        ("forget", EventKind::Forget),
        ("forgotten", EventKind::Forgotten),
        ("trained", EventKind::Trained),
        ("summary", EventKind::Summary),
    ];

    /// Whether a version took effect by it.
    pub(super) fn is_start(self) -> bool {
        use EventKind::*;
        matches!(
            self,
            Calibrated | Accepted | RolledBack | Imported | Forgotten
        )
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        Self::ALL
            .iter()
            .find(|(_, kind)| *kind == self)
            .map_or("", |(name, _)| name)
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
    /// Tokens of the trajectories that were kept to judge by, and their mean loss in nats with
    /// what was in effect before and with what was learnt.
    pub judged: (u64, f64, f64),
    /// Mean divergence from the model on control text of what was learnt, in nats; 0 without
    /// control text.
    pub divergence: f64,
    /// Hashes of the names of the sessions that were learnt from, or that is to be forgotten; may
    /// be [`ANY_SESSION`].
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

    /// Whether the session was learnt from.
    pub(super) fn has_learnt(&self, session: u64) -> bool {
        let learns = !matches!(self.kind, EventKind::Forget | EventKind::Forgotten);
        learns
            && self
                .sessions
                .iter()
                .any(|&learnt| learnt == session || learnt == ANY_SESSION)
    }

    /// One event for adjacent ones, which leaves in effect what they did and names the sessions
    /// they learnt from.
    fn summary(events: &[Event]) -> Option<Event> {
        let last = events.last()?;
        let mut sum = Event {
            kind: EventKind::Summary,
            n_learnt: [0; 2],
            sessions: Vec::new(),
            ..last.clone()
        };
        sum.judged = (0, 0.0, 0.0);
        for event in events {
            (0..2)
                .for_each(|i| sum.n_learnt[i] = sum.n_learnt[i].saturating_add(event.n_learnt[i]));
            if !matches!(event.kind, EventKind::Forget | EventKind::Forgotten) {
                sum.sessions.extend(&event.sessions);
            }
        }
        sum.sessions.sort_unstable();
        sum.sessions.dedup();
        if sum.sessions.len() > MAX_SESSIONS || sum.sessions.first() == Some(&ANY_SESSION) {
            sum.sessions = vec![ANY_SESSION];
        }
        Some(sum)
    }

    /// A history in fewer events, in which the first `n_old` that nothing depends on are summed up.
    /// Of each version that `is_there`, and the newest of all, those stay that made it, and by
    /// which its owner returned to it; and the last training. So going back and forgetting do
    /// what they would have done.
    pub(super) fn summarised(
        history: &[Event],
        n_old: usize,
        is_there: impl Fn(u64) -> bool,
    ) -> Vec<Event> {
        let newest = history.iter().map(|event| event.version).max().unwrap_or(0);
        let is_needed = |i: usize| {
            let (before, event, after) = (&history[..i], &history[i], &history[i + 1..]);
            let same = |other: &Event| other.kind.is_start() && other.version == event.version;
            let is_end = !before.iter().any(same) || !after.iter().any(same);
            let is_return = matches!(event.kind, EventKind::RolledBack | EventKind::Forgotten);
            let is_held = event.version == 0 || event.version == newest || is_there(event.version);
            let is_training = |event: &Event| event.kind == EventKind::Trained;
            event.kind.is_start() && is_held && (is_end || is_return)
                || is_training(event) && !after.iter().any(is_training)
        };
        let (mut left, mut run) = (Vec::new(), Vec::new());
        for (i, event) in history.iter().enumerate() {
            let mut event = event.clone();
            if i < n_old {
                // What was forgotten since is in nothing any more.
                let is_undone = |session: &u64| {
                    let forgotten =
                        |e: &Event| e.kind == EventKind::Forgotten && e.sessions.contains(session);
                    history[i + 1..].iter().any(forgotten)
                };
                event.sessions.retain(|session| !is_undone(session));
                if !is_needed(i) {
                    run.push(event);
                    continue;
                }
            }
            left.extend(Event::summary(&std::mem::take(&mut run)));
            left.push(event);
        }
        left.extend(Event::summary(&run));
        left
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let mut e = Encoder::default();
        let kind = EventKind::ALL
            .iter()
            .position(|(_, kind)| *kind == self.kind)
            .unwrap_or_default();
        e.u8(kind as u8)
            .u64(self.timestamp)
            .u64(self.version)
            .u64(self.through);
        e.u64(self.n_learnt[0]).u64(self.n_learnt[1]);
        e.u64(self.judged.0)
            .f64(self.judged.1)
            .f64(self.judged.2)
            .f64(self.divergence)
            .list(&self.sessions);
        e.0
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Event, String> {
        let mut d = Decoder(bytes);
        let kind = d.u8()?;
        let (_, kind) = EventKind::ALL
            .get(usize::from(kind))
            .ok_or_else(|| format!("an event is of the unknown kind {kind}"))?;
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
