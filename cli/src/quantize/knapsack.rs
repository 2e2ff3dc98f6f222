//! The choice of a type for each of some groups so that the sum of losses is the least that a number
//! of bytes allows.

/// A type that a group can have.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Candidate<T> {
    pub(crate) what: T,
    pub(crate) bytes: u64,
    pub(crate) loss: f64,
}

/// Most partial choices that are kept after each group. With so many, the best one of a size is
/// missed by far less than the losses are uncertain.
const MAX_KEPT: usize = 20_000;

/// A choice for the first groups.
#[derive(Clone)]
struct Partial {
    bytes: u64,
    loss: f64,
    /// The candidate of the last of these groups, and the place of the choice for those before.
    candidate: usize,
    before: usize,
}

/// The candidate of each group; the least number of bytes that is possible if `limit` is below it.
pub(crate) fn choose<T>(groups: &[Vec<Candidate<T>>], limit: u64) -> Result<Vec<usize>, u64> {
    let start = Partial {
        bytes: 0,
        loss: 0.0,
        candidate: 0,
        before: 0,
    };
    let mut steps = vec![vec![start]];
    for group in groups {
        let last = &steps[steps.len() - 1];
        let mut next = Vec::with_capacity(last.len() * group.len());
        for (before, partial) in last.iter().enumerate() {
            next.extend(group.iter().enumerate().map(|(i, candidate)| Partial {
                bytes: partial.bytes.saturating_add(candidate.bytes),
                loss: partial.loss + candidate.loss,
                candidate: i,
                before,
            }));
        }
        steps.push(frontier(next));
    }
    let last = &steps[steps.len() - 1];
    let fits = last
        .iter()
        .enumerate()
        .filter(|(_, partial)| partial.bytes <= limit);
    let best = fits.min_by(|(_, a), (_, b)| a.loss.total_cmp(&b.loss));
    let Some((mut at, _)) = best else {
        return Err(last.iter().map(|partial| partial.bytes).min().unwrap_or(0));
    };
    let mut chosen: Vec<usize> = Vec::with_capacity(groups.len());
    for step in steps.iter().skip(1).rev() {
        chosen.push(step[at].candidate);
        at = step[at].before;
    }
    chosen.reverse();
    Ok(chosen)
}

/// Those that no other one is better than in both respects, by size.
fn frontier(mut all: Vec<Partial>) -> Vec<Partial> {
    all.sort_by(|a, b| a.bytes.cmp(&b.bytes).then(a.loss.total_cmp(&b.loss)));
    let mut kept: Vec<Partial> = Vec::new();
    for partial in all {
        if kept.last().is_none_or(|last| partial.loss < last.loss) {
            kept.push(partial);
        }
    }
    let step = kept.len().div_ceil(MAX_KEPT);
    if step > 1 {
        // The smallest one stays: it says what is possible.
        kept = kept.into_iter().step_by(step).collect();
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As trying every choice.
    #[test]
    fn the_best_of_all_choices() {
        let number = |i: u64| i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
        for case in 0..50u64 {
            let candidate = |i: u64| Candidate {
                what: (),
                bytes: number(case * 31 + i) % 100,
                loss: (number(case * 77 + i + 1000) % 1000) as f64,
            };
            let groups: Vec<Vec<Candidate<()>>> = (0..5)
                .map(|g| (0..4).map(|i| candidate(10 * g + i)).collect())
                .collect();
            let sums = |choice: &[usize]| {
                let chosen = groups.iter().zip(choice).map(|(group, &i)| group[i]);
                chosen.fold((0, 0.0), |(b, l), c| (b + c.bytes, l + c.loss))
            };
            let all = (0..4usize.pow(5)).map(|n| {
                let digits: Vec<usize> = (0..5).map(|g| n / 4usize.pow(g) % 4).collect();
                sums(&digits)
            });
            let all: Vec<(u64, f64)> = all.collect();
            let least = all.iter().map(|(bytes, _)| *bytes).min().unwrap();
            for limit in [least, least + 20, 300] {
                let fits = all.iter().filter(|(bytes, _)| *bytes <= limit);
                let best = fits.map(|(_, loss)| *loss).fold(f64::INFINITY, f64::min);
                let (bytes, loss) = sums(&choose(&groups, limit).unwrap());
                assert!(bytes <= limit && loss == best, "{case}: {loss} {best}");
            }
            if least > 0 {
                assert_eq!(choose(&groups, least - 1), Err(least));
            }
        }
    }
}
