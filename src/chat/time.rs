//! Time of day and calendar for `strftime_now`.

use crate::chat::ChatError;
use crate::system::HAS_THREADS;
use std::fmt;
use std::str::FromStr;
use std::time::{SystemTime, UNIX_EPOCH};

/// A point in time on the local clock, without a time zone: what Python calls a naive
/// `datetime`. Parses from ISO 8601, `2025-01-15T09:05:07`; seconds, their fraction and the time
/// may be left out, a zone is ignored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LocalTime {
    year: i64,
    month: u32,
    day: u32,
    hour: u32,
    minute: u32,
    second: u32,
    microsecond: u32,
}

const WEEKDAYS: [&str; 7] = [
    "Monday",
    "Tuesday",
    "Wednesday",
    "Thursday",
    "Friday",
    "Saturday",
    "Sunday",
];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// Days from 1970-01-01 to a date of the Gregorian calendar (Hinnant, "chrono-compatible
/// low-level date algorithms", `days_from_civil`).
fn days_from_civil(year: i64, month: u32, day: u32) -> i64 {
    let y = if month <= 2 { year - 1 } else { year };
    let era = y.div_euclid(400);
    let year_of_era = y.rem_euclid(400);
    let day_of_year =
        (153 * (i64::from(month) + if month > 2 { -3 } else { 9 }) + 2) / 5 + i64::from(day) - 1;
    era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year - 719_468
}

/// The inverse of [`days_from_civil`]: (year, month, day).
fn civil_from_days(days: i64) -> (i64, u32, u32) {
    let z = days + 719_468;
    let era = z.div_euclid(146_097);
    let doe = z.rem_euclid(146_097);
    let yoe = (doe - doe / 1460 + doe / 36_524 - doe / 146_096) / 365;
    let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
    let mp = (5 * doy + 2) / 153;
    let day = doy - (153 * mp + 2) / 5 + 1;
    let month = if mp < 10 { mp + 3 } else { mp - 9 };
    (
        yoe + era * 400 + i64::from(month <= 2),
        month as u32,
        day as u32,
    )
}

impl LocalTime {
    /// The system clock in UTC; the beginning of 1970 on wasm32-unknown-unknown, which has none.
    pub fn now_utc() -> Self {
        Self::utc(if HAS_THREADS {
            SystemTime::now()
        } else {
            UNIX_EPOCH
        })
    }

    /// A time in UTC; one before 1970 is its beginning.
    pub fn utc(time: SystemTime) -> Self {
        let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
        let seconds = since.as_secs();
        let (year, month, day) = civil_from_days((seconds / 86_400) as i64);
        let of_day = (seconds % 86_400) as u32;
        Self {
            year,
            month,
            day,
            hour: of_day / 3600,
            minute: of_day / 60 % 60,
            second: of_day % 60,
            microsecond: since.subsec_micros(),
        }
    }

    /// Days since 1970-01-01, a Thursday.
    fn days(&self) -> i64 {
        days_from_civil(self.year, self.month, self.day)
    }

    /// Day of the week; 0 is Monday.
    fn weekday(&self) -> usize {
        (self.days() + 3).rem_euclid(7) as usize
    }

    /// Day of the year; 1 is the first of January.
    fn day_of_year(&self) -> i64 {
        self.days() - days_from_civil(self.year, 1, 1) + 1
    }

    /// ISO 8601 year and week: the week belongs to the year of its Thursday.
    fn iso_week(&self) -> (i64, i64) {
        let thursday = self.days() - self.weekday() as i64 + 3;
        let (year, ..) = civil_from_days(thursday);
        (year, (thursday - days_from_civil(year, 1, 1)) / 7 + 1)
    }

    /// Formats like C's and Python's `strftime` in the C locale, with glibc's `-` (no padding)
    /// and `_` (spaces) flags. An unknown directive stays as it is.
    pub fn strftime(&self, format: &str) -> String {
        let mut out = String::new();
        let mut rest = format;
        while let Some(at) = rest.find('%') {
            out.push_str(&rest[..at]);
            let directive = &rest[at + 1..];
            let flag = directive.chars().next().filter(|c| matches!(c, '-' | '_'));
            let after_flag = &directive[flag.map_or(0, char::len_utf8)..];
            let Some(code) = after_flag.chars().next() else {
                out.push_str(&rest[at..]);
                return out;
            };
            match self.directive(code, flag) {
                Some(text) => out.push_str(&text),
                None => out.extend(['%'].into_iter().chain(flag).chain([code])),
            }
            rest = &after_flag[code.len_utf8()..];
        }
        out + rest
    }

    fn directive(&self, code: char, flag: Option<char>) -> Option<String> {
        let number = |value: i64, width: usize, pad: char| match (flag, pad) {
            (Some('-'), _) => value.to_string(),
            (Some('_'), _) | (None, ' ') => format!("{value:width$}"),
            _ => format!("{value:0width$}"),
        };
        let padded = |value: u32| number(i64::from(value), 2, '0');
        let hour12 = (self.hour + 11) % 12 + 1;
        let weekday = self.weekday();
        let (iso_year, iso_week) = self.iso_week();
        Some(match code {
            'a' => WEEKDAYS[weekday][..3].into(),
            'A' => WEEKDAYS[weekday].into(),
            'b' | 'h' => MONTHS[self.month as usize - 1][..3].into(),
            'B' => MONTHS[self.month as usize - 1].into(),
            'c' => self.strftime("%a %b %e %H:%M:%S %Y"),
            'C' => number(self.year.div_euclid(100), 2, '0'),
            'd' => padded(self.day),
            'D' | 'x' => self.strftime("%m/%d/%y"),
            'e' => number(i64::from(self.day), 2, ' '),
            'f' => format!("{:06}", self.microsecond),
            'F' => self.strftime("%Y-%m-%d"),
            'g' => number(iso_year.rem_euclid(100), 2, '0'),
            'G' => iso_year.to_string(),
            'H' => padded(self.hour),
            'I' => padded(hour12),
            'j' => number(self.day_of_year(), 3, '0'),
            'k' => number(i64::from(self.hour), 2, ' '),
            'l' => number(i64::from(hour12), 2, ' '),
            'm' => padded(self.month),
            'M' => padded(self.minute),
            'n' => "\n".into(),
            'p' => if self.hour < 12 { "AM" } else { "PM" }.into(),
            'P' => if self.hour < 12 { "am" } else { "pm" }.into(),
            'r' => self.strftime("%I:%M:%S %p"),
            'R' => self.strftime("%H:%M"),
            's' => {
                let of_day = self.hour * 3600 + self.minute * 60 + self.second;
                (self.days() * 86_400 + i64::from(of_day)).to_string()
            }
            'S' => padded(self.second),
            't' => "\t".into(),
            'T' | 'X' => self.strftime("%H:%M:%S"),
            'u' => (weekday + 1).to_string(),
            // Weeks of the year that begin on a Sunday, and on a Monday.
            'U' => number(
                (self.day_of_year() + 6 - (weekday as i64 + 1) % 7) / 7,
                2,
                '0',
            ),
            'W' => number((self.day_of_year() + 6 - weekday as i64) / 7, 2, '0'),
            'V' => number(iso_week, 2, '0'),
            'w' => ((weekday + 1) % 7).to_string(),
            'y' => number(self.year.rem_euclid(100), 2, '0'),
            'Y' => number(self.year, 4, '0'),
            // Empty, as a naive time has no zone.
            'z' | 'Z' => String::new(),
            '%' => "%".into(),
            _ => return None,
        })
    }
}

/// ISO 8601.
impl fmt::Display for LocalTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.strftime("%Y-%m-%dT%H:%M:%S.%f"))
    }
}

impl FromStr for LocalTime {
    type Err = ChatError;

    fn from_str(text: &str) -> Result<Self, ChatError> {
        parse(text).ok_or_else(|| ChatError::Time(text.to_owned()))
    }
}

fn parse(text: &str) -> Option<LocalTime> {
    let number = |s: &str, digits: usize| {
        let ok = s.len() == digits && s.bytes().all(|b| b.is_ascii_digit());
        ok.then(|| s.parse::<u32>().ok()).flatten()
    };
    let (date, clock) = text
        .trim()
        .split_once(['T', 't', ' '])
        .unwrap_or((text.trim(), "00:00"));
    let mut date = date.split('-');
    let year = number(date.next()?, 4)?;
    let (month, day) = (number(date.next()?, 2)?, number(date.next()?, 2)?);
    let clock = clock.split(['Z', 'z', '+', '-']).next()?;
    let (clock, fraction) = clock.split_once(['.', ',']).unwrap_or((clock, "0"));
    let mut parts = clock.split(':');
    let (hour, minute) = (number(parts.next()?, 2)?, number(parts.next()?, 2)?);
    let second = parts.next().map_or(Some(0), |s| number(s, 2))?;
    if !fraction.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let microsecond = format!("{fraction:0<6}")[..6].parse().ok()?;
    let whole = date.next().is_none() && parts.next().is_none();
    let time = LocalTime {
        year: year.into(),
        month,
        day,
        hour,
        minute,
        second,
        microsecond,
    };
    // A date that does not exist changes on the way to a day number and back.
    let exists = (1..=12).contains(&month)
        && civil_from_days(time.days()) == (time.year, month, day)
        && hour < 24
        && minute < 60
        && second < 60;
    (whole && exists).then_some(time)
}

#[cfg(test)]
mod tests {
    use crate::chat::time::*;

    #[test]
    fn refuses_what_is_no_time() {
        for bad in [
            "",
            "2025",
            "2025-02-29",
            "2025-13-01",
            "2025-01-15T24:00",
            "2025-01-15T09:05:07:1",
            "2025-01-15x",
            "+025-01-15",
            "2025-01-15T09:05:07.x",
        ] {
            assert_eq!(
                bad.parse::<LocalTime>(),
                Err(ChatError::Time(bad.into())),
                "{bad}"
            );
        }
    }

    #[test]
    fn days_and_dates_are_inverse() {
        for days in (-800_000..800_000).step_by(37) {
            let (y, m, d) = civil_from_days(days);
            assert_eq!(days_from_civil(y, m, d), days);
        }
        assert_eq!(days_from_civil(2000, 2, 29), 11_016);
    }

    #[test]
    fn a_time_is_read_as_it_is_written() {
        let time: LocalTime = "2025-01-05T09:05:07.25".parse().unwrap();
        assert_eq!(time.to_string().parse(), Ok(time));
    }

    /// Results of CPython's `datetime.strftime` on glibc.
    #[test]
    fn formats_as_python_does() {
        let t: LocalTime = "2025-01-05T09:05:07.25".parse().unwrap();
        for (format, expected) in [
            ("%Y-%m-%d %H:%M:%S", "2025-01-05 09:05:07"),
            ("%d %b %Y", "05 Jan 2025"),
            ("%A, %B %-d, %y", "Sunday, January 5, 25"),
            ("%a %e|%I %p|%-I:%M|%-m/%-H", "Sun  5|09 AM|9:05|1/9"),
            ("%j %U %W %V %G %u %w", "005 01 00 01 2025 7 0"),
            (
                "%c | %x | %X | %D | %F | %T | %R",
                "Sun Jan  5 09:05:07 2025 | 01/05/25 | 09:05:07 | 01/05/25 | 2025-01-05 | 09:05:07 | 09:05",
            ),
            ("%f %% %Z%z.", "250000 % ."),
        ] {
            assert_eq!(t.strftime(format), expected, "{format}");
        }
        let t: LocalTime = "2024-12-31 23:59".parse().unwrap();
        assert_eq!(
            t.strftime("%j %U %W %V %G %I%p %-j"),
            "366 52 53 01 2025 11PM 366"
        );
        let t: LocalTime = "2024-07-04".parse().unwrap();
        assert_eq!(t.strftime("%I:%M %p %q %"), "12:00 AM %q %");
    }
}
