//! Numbers of bytes and of parameters, told and read.

/// A number of bytes for people.
pub(crate) fn size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let (mut value, mut unit) = (bytes as f64, 0);
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        (value, unit) = (value / 1024.0, unit + 1);
    }
    if unit == 0 {
        format!("{bytes} B")
    } else {
        format!("{value:.2} {}", UNITS[unit])
    }
}

/// A number of parameters for people.
pub(crate) fn count(n: u64) -> String {
    match n {
        0..1_000 => n.to_string(),
        1_000..1_000_000 => format!("{:.1} K", n as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} M", n as f64 / 1e6),
        _ => format!("{:.2} B", n as f64 / 1e9),
    }
}

/// A number of bytes: `512M`, `8G`, `1.5GiB`, or plain.
pub(crate) fn parse_size(text: &str) -> Result<u64, String> {
    let wrong = || format!("{text:?} is no size: expected bytes, or as in 512M, 8G, 1.5G");
    let split = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let unit = unit.trim_start().to_ascii_lowercase();
    let unit = ["ib", "b"]
        .iter()
        .find_map(|end| unit.strip_suffix(end))
        .unwrap_or(&unit);
    let power = ["", "k", "m", "g", "t"]
        .iter()
        .position(|name| *name == unit)
        .ok_or_else(wrong)?;
    let number: f64 = number.parse().map_err(|_| wrong())?;
    let bytes = number * 1024f64.powi(power as i32);
    if bytes < 1.0 || bytes >= u64::MAX as f64 {
        Err(wrong())
    } else {
        Ok(bytes as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        for (text, bytes) in [
            ("1", 1),
            ("512M", 512 << 20),
            ("8G", 8 << 30),
            ("1.5GiB", 3 << 29),
            ("64 kB", 64 << 10),
            ("2t", 2 << 40),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        for text in [
            "",
            "0",
            "G",
            "-1G",
            "8X",
            "8GG",
            "1e9",
            "99999999999T",
            "0.1",
            "inf",
            "1..2M",
        ] {
            assert!(parse_size(text).is_err(), "{text}");
        }
    }
}
