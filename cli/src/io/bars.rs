//! Bars as SVG: a number for each name, on light and on dark grounds.

use super::failure::Failure;
use super::plot::{COLOURS, STYLE, escaped, number, ticks};
use std::fmt::Write;
use std::path::Path;

/// A bar.
pub(crate) struct Bar {
    pub(crate) name: String,
    pub(crate) value: f64,
    /// What stands behind it.
    pub(crate) label: String,
}

/// Bars one below the other.
pub(crate) struct Bars {
    pub(crate) title: String,
    pub(crate) x_label: String,
    /// Where a line stands for what the values are compared with.
    pub(crate) base: f64,
    pub(crate) bars: Vec<Bar>,
}

const WIDTH: f64 = 420.0;
const TOP: f64 = 34.0;
/// From a bar to the next.
const STEP: f64 = 24.0;
/// Of a character, about.
const CHARACTER: f64 = 7.0;

/// Width of the longest of some texts.
fn longest<'t>(texts: impl Iterator<Item = &'t String>) -> f64 {
    texts.map(|text| text.chars().count()).max().unwrap_or(0) as f64 * CHARACTER
}

impl Bars {
    /// Writes them to a file.
    pub(crate) fn write(&self, path: &Path) -> Result<(), Failure> {
        std::fs::write(path, self.svg()).map_err(Failure::file(path))
    }

    /// The file.
    fn svg(&self) -> String {
        let values = || self.bars.iter().map(|bar| bar.value);
        let high = values().filter(|value| value.is_finite());
        let ticks = ticks(0.0, high.fold(self.base, f64::max));
        let end = ticks[ticks.len() - 1];
        let left = 20.0 + longest(self.bars.iter().map(|bar| &bar.name));
        let x = |value: f64| left + WIDTH * value.clamp(0.0, end) / end;
        let bottom = TOP + STEP * self.bars.len() as f64 + 6.0;
        let width = left + WIDTH + 30.0 + longest(self.bars.iter().map(|bar| &bar.label));
        let mut out = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {}\" font-family=\"sans-serif\" \
             font-size=\"12\">\n{STYLE}\n<rect class=\"ground\" width=\"100%\" height=\"100%\"/>\n\
             <text x=\"12\" y=\"18\" font-size=\"14\">{}</text>\n",
            bottom + 48.0,
            escaped(&self.title)
        );
        let line = |out: &mut String, class: &str, value: f64| {
            let at = x(value);
            let _ = writeln!(
                out,
                "<line class=\"{class}\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{TOP}\" y2=\"{bottom}\"/>"
            );
        };
        for &tick in &ticks {
            line(&mut out, "grid", tick);
            let _ = writeln!(
                out,
                "<text x=\"{:.1}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
                x(tick),
                bottom + 16.0,
                number(tick, ticks[1] - ticks[0]),
            );
        }
        for (i, bar) in self.bars.iter().enumerate() {
            let at = TOP + STEP * i as f64 + 6.0;
            let _ = writeln!(
                out,
                "<rect x=\"{left}\" y=\"{at}\" width=\"{:.1}\" height=\"{}\" fill=\"{}\"/>\
                 <text x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text><text x=\"{:.1}\" y=\"{}\">{}</text>",
                // A value that is no number has no bar.
                x(bar.value.max(0.0)) - left,
                STEP - 8.0,
                COLOURS[0],
                left - 6.0,
                at + 12.0,
                escaped(&bar.name),
                x(bar.value.max(0.0)) + 6.0,
                at + 12.0,
                escaped(&bar.label),
            );
        }
        line(&mut out, "zero", self.base);
        let _ = writeln!(
            out,
            "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{}</text>\n</svg>",
            left + WIDTH / 2.0,
            bottom + 38.0,
            escaped(&self.x_label),
        );
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_have_their_lengths() {
        let bar = |name: &str, value| Bar {
            name: name.into(),
            value,
            label: format!("{value:.2}"),
        };
        let svg = Bars {
            title: "a < b".into(),
            x_label: "times as fast".into(),
            base: 1.0,
            bars: vec![bar("edit", 2.0), bar("prose", f64::NAN)],
        }
        .svg();
        // Names of five characters, an axis up to 2.
        assert!(
            svg.contains("<rect x=\"55\" y=\"40\" width=\"420.0\""),
            "{svg}"
        );
        assert!(
            svg.contains("<rect x=\"55\" y=\"64\" width=\"0.0\""),
            "{svg}"
        );
        assert!(svg.contains("class=\"zero\" x1=\"265.0\""), "{svg}");
        assert!(svg.contains(">a &lt; b<") && svg.ends_with("</svg>\n"));
    }
}
