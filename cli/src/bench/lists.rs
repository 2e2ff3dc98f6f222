//! Lists of numbers and ranges in flags: `1,2`, `128-1024*2`.

use crate::io::Failure;

/// Numbers and ranges: `1,2`, `1-4`, `128-512+128`, `128-1024*2`.
pub(super) fn list(text: &str, flag: &str) -> Result<Vec<usize>, Failure> {
    /// Longer lists, and larger numbers, are slips of the finger.
    const MAX: usize = 1 << 20;
    let wrong = || {
        Failure::Usage(format!(
            "{flag} {text}: expected numbers or ranges such as 1,2 or 128-1024*2"
        ))
    };
    let number = |s: &str| {
        s.trim()
            .parse::<usize>()
            .ok()
            .filter(|&n| n <= MAX)
            .ok_or_else(wrong)
    };
    let mut all = Vec::new();
    for part in text.split(',') {
        let Some((first, rest)) = part.split_once('-') else {
            all.push(number(part)?);
            continue;
        };
        let (last, step, factor) = match (rest.split_once('+'), rest.split_once('*')) {
            (Some((last, step)), _) => (last, number(step)?, 1),
            (None, Some((last, factor))) => (last, 0, number(factor)?),
            (None, None) => (rest, 1, 1),
        };
        let (mut n, last) = (number(first)?, number(last)?);
        if n > last {
            return Err(Failure::Usage(format!(
                "{flag} {text}: {n}-{last} is a range backwards, and empty"
            )));
        }
        while n <= last && all.len() < 1000 {
            all.push(n);
            let next = n * factor + step;
            if next <= n {
                return Err(wrong());
            }
            n = next;
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::list;

    #[test]
    fn lists_and_ranges() {
        let list = |text| list(text, "-p").ok();
        assert_eq!(list("512"), Some(vec![512]));
        assert_eq!(list("1,2,8"), Some(vec![1, 2, 8]));
        assert_eq!(list("1-4"), Some(vec![1, 2, 3, 4]));
        assert_eq!(list("128-512+128"), Some(vec![128, 256, 384, 512]));
        assert_eq!(list("128-1024*2,7"), Some(vec![128, 256, 512, 1024, 7]));
        for wrong in [
            "", "a", "1-", "-1", "1-9*1", "1-9*0", "1-9+0", "0-9*2", "99999999", "64-16",
        ] {
            assert_eq!(list(wrong), None, "{wrong}");
        }
    }
}
