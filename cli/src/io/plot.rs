//! Plots as SVG: lines and points over two axes, on light and on dark grounds.

use super::failure::Failure;
use std::fmt::Write;
use std::path::Path;

/// What a series looks like.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Mark {
    Line,
    /// A broken line, as of a control.
    Dashes,
    Dots,
    /// A circle around each point.
    Rings,
}

/// Points `(x, y)` that belong together.
pub(crate) struct Series {
    /// In the legend; empty: not there.
    pub(crate) name: String,
    pub(crate) mark: Mark,
    pub(crate) points: Vec<(f64, f64)>,
    /// What stands beside the points, as far as there is anything.
    pub(crate) labels: Vec<String>,
}

/// A plot.
pub(crate) struct Plot {
    pub(crate) title: String,
    pub(crate) x_label: String,
    pub(crate) y_label: String,
    /// Whether the y axis is logarithmic; points that are not above 0 have no place then.
    pub(crate) is_log: bool,
    pub(crate) series: Vec<Series>,
}

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 400.0;
const LEFT: f64 = 70.0;
const TOP: f64 = 34.0;
/// Below the area: numbers and the name of the axis.
const BELOW: f64 = 48.0;
/// Most points of a line: more are not to be told apart.
const MAX_POINTS: usize = 1440;
/// Ten that are told apart on white and on black, by people who see fewer colours, too.
pub(super) const COLOURS: [&str; 10] = [
    "#3b7dd8", "#e07b00", "#2a9d4e", "#d6404a", "#9460c9", "#9b6a4b", "#d65fb0", "#8a8f98",
    "#a8a000", "#12a5b8",
];
pub(super) const STYLE: &str = "<style>text{fill:#1a1c20}.ground{fill:#fff}.grid{stroke:#ddd}.zero{stroke:#666}\
                     @media(prefers-color-scheme:dark){text{fill:#e8eaee}.ground{fill:#16181c}.grid{stroke:#3a3e46}\
                     .zero{stroke:#a8afba}}</style>";

/// Round numbers, 1, 2 or 5 times a power of ten apart, from one not above `low` to one not below
/// `high`, some five of them.
pub(super) fn ticks(low: f64, high: f64) -> Vec<f64> {
    let span = if high > low { high - low } else { 1.0 };
    let power = 10f64.powf((span / 5.0).log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0]
        .map(|n| n * power)
        .into_iter()
        .find(|step| span / step <= 6.0)
        .unwrap_or(10.0 * power);
    let first = (low / step).floor();
    let n = (high / step).ceil().max(first + 1.0) - first;
    (0..=n as usize)
        .map(|i| (first + i as f64) * step)
        .collect()
}

/// A number of an axis whose numbers are `step` apart.
pub(super) fn number(x: f64, step: f64) -> String {
    let digits = (-step.log10() - 1e-9).ceil().clamp(0.0, 9.0) as usize;
    // No -0.
    format!("{:.digits$}", x + 0.0)
}

pub(super) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

/// The two axes: where values lie.
struct Axes {
    x: Vec<f64>,
    y: Vec<f64>,
    is_log: bool,
}

impl Axes {
    fn of(plot: &Plot) -> Axes {
        let points = || plot.series.iter().flat_map(|s| &s.points);
        let range = |values: &mut dyn Iterator<Item = f64>| {
            values
                .filter(|value| value.is_finite())
                .fold((f64::INFINITY, f64::NEG_INFINITY), |(a, b), x| {
                    (a.min(x), b.max(x))
                })
        };
        let (x_low, x_high) = range(&mut points().map(|p| p.0));
        let (y_low, y_high) =
            range(&mut points().map(|p| if plot.is_log { p.1.log10() } else { p.1 }));
        let x = ticks(x_low.min(0.0), x_high.max(0.0));
        let y = if !plot.is_log {
            ticks(y_low.min(0.0), y_high.max(0.0))
        } else if y_low <= y_high {
            let (low, high) = (y_low.floor(), y_high.ceil().max(y_low.floor() + 1.0));
            (0..=(high - low) as usize)
                .map(|i| low + i as f64)
                .collect()
        } else {
            vec![-1.0, 0.0]
        };
        Axes {
            x,
            y,
            is_log: plot.is_log,
        }
    }

    fn x(&self, value: f64) -> f64 {
        let (low, high) = (self.x[0], self.x[self.x.len() - 1]);
        LEFT + WIDTH * (value - low) / (high - low)
    }

    fn y(&self, value: f64) -> f64 {
        let value = if self.is_log { value.log10() } else { value };
        let (low, high) = (self.y[0], self.y[self.y.len() - 1]);
        TOP + HEIGHT * (high - value) / (high - low)
    }

    /// Lines of the grid, their numbers, the line of zero.
    fn draw(&self, out: &mut String) {
        let (right, bottom) = (LEFT + WIDTH, TOP + HEIGHT);
        for &tick in &self.y {
            let value = if self.is_log { 10f64.powf(tick) } else { tick };
            let text = match self.is_log {
                true if tick < -4.0 => format!("1e{tick}"),
                true => number(value, value.min(1.0)),
                false => number(tick, self.y[1] - self.y[0]),
            };
            let at = self.y(value);
            let class = if !self.is_log && tick == 0.0 {
                "zero"
            } else {
                "grid"
            };
            let _ = writeln!(
                out,
                "<line class=\"{class}\" x1=\"{LEFT}\" x2=\"{right}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>\
                 <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{text}</text>",
                LEFT - 6.0,
                at + 4.0,
            );
        }
        for &tick in &self.x {
            let at = self.x(tick);
            let _ = writeln!(
                out,
                "<line class=\"grid\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{bottom}\" y2=\"{}\"/>\
                 <text x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
                bottom + 4.0,
                bottom + 18.0,
                number(tick, self.x[1] - self.x[0]),
            );
        }
    }
}

impl Series {
    /// Its points and their labels, those that have a place.
    fn places<'s>(&'s self, axes: &'s Axes) -> impl Iterator<Item = (f64, f64, &'s str)> {
        let labels = self.labels.iter().map(String::as_str);
        let labels = labels.chain(std::iter::repeat(""));
        self.points
            .iter()
            .zip(labels)
            .filter(|((x, y), _)| x.is_finite() && y.is_finite() && (!axes.is_log || *y > 0.0))
            .map(|(&(x, y), label)| (axes.x(x), axes.y(y), label))
    }

    fn draw(&self, out: &mut String, axes: &Axes, colour: &str) {
        if matches!(self.mark, Mark::Line | Mark::Dashes) {
            let places: Vec<_> = self
                .places(axes)
                .map(|(x, y, _)| format!("{x:.1},{y:.1}"))
                .collect();
            let every = places.len().div_ceil(MAX_POINTS).max(1);
            let last = places.len().saturating_sub(1);
            let kept = places
                .iter()
                .enumerate()
                .filter(|(i, _)| i % every == 0 || *i == last);
            let kept: Vec<&str> = kept.map(|(_, place)| place.as_str()).collect();
            let _ = writeln!(
                out,
                "<polyline fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.5\"{} points=\"{}\"/>",
                self.dashes(),
                kept.join(" "),
            );
        }
        for (x, y, label) in self.places(axes) {
            let (x, y, label) = (format!("{x:.1}"), format!("{y:.1}"), escaped(label));
            self.point(out, (&x, &y), colour);
            if !label.is_empty() {
                let _ = writeln!(
                    out,
                    "<text x=\"{x}\" y=\"{y}\" dx=\"5\" dy=\"-4\">{label}</text>"
                );
            }
        }
    }

    /// The mark of a point, if it has one.
    fn point(&self, out: &mut String, (x, y): (&str, &str), colour: &str) {
        let look = match self.mark {
            Mark::Dots => format!("r=\"3\" fill=\"{colour}\""),
            Mark::Rings => format!("r=\"7\" fill=\"none\" stroke=\"{colour}\""),
            Mark::Line | Mark::Dashes => return,
        };
        let _ = writeln!(out, "<circle cx=\"{x}\" cy=\"{y}\" {look}/>");
    }

    fn dashes(&self) -> &'static str {
        match self.mark {
            Mark::Dashes => " stroke-dasharray=\"4 3\"",
            _ => "",
        }
    }

    /// Its mark and its name, at a height.
    fn legend(&self, out: &mut String, colour: &str, at: f64) {
        let (left, right) = (LEFT + WIDTH + 14.0, LEFT + WIDTH + 36.0);
        let middle = f64::midpoint(left, right);
        if matches!(self.mark, Mark::Line | Mark::Dashes) {
            let _ = writeln!(
                out,
                "<line x1=\"{left}\" x2=\"{right}\" y1=\"{at}\" y2=\"{at}\" stroke=\"{colour}\" stroke-width=\"2\"{}/>",
                self.dashes()
            );
        }
        self.point(out, (&middle.to_string(), &at.to_string()), colour);
        let _ = writeln!(
            out,
            "<text x=\"{}\" y=\"{}\">{}</text>",
            right + 6.0,
            at + 4.0,
            escaped(&self.name)
        );
    }
}

impl Plot {
    /// Writes it to a file.
    pub(crate) fn write(&self, path: &Path) -> Result<(), Failure> {
        std::fs::write(path, self.svg()).map_err(Failure::file(path))
    }

    /// The file.
    pub(crate) fn svg(&self) -> String {
        let named = || self.series.iter().filter(|s| !s.name.is_empty());
        let longest = named().map(|s| s.name.chars().count()).max();
        let beside = longest.map_or(30.0, |n| 50.0 + 7.0 * n as f64);
        let (width, height) = (
            LEFT + WIDTH + beside,
            (TOP + HEIGHT + BELOW).max(TOP + 20.0 * named().count() as f64),
        );
        let mut out = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" \
             font-size=\"12\">\n{STYLE}\n<rect class=\"ground\" width=\"100%\" height=\"100%\"/>\n\
             <text x=\"{LEFT}\" y=\"18\" font-size=\"14\">{}</text>\n",
            escaped(&self.title)
        );
        let axes = Axes::of(self);
        axes.draw(&mut out);
        let middle = TOP + HEIGHT / 2.0;
        let _ = writeln!(
            out,
            "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{}</text>\n\
             <text transform=\"translate(16 {middle}) rotate(-90)\" text-anchor=\"middle\">{}</text>",
            LEFT + WIDTH / 2.0,
            TOP + HEIGHT + 40.0,
            escaped(&self.x_label),
            escaped(&self.y_label),
        );
        let mut at = TOP + 10.0;
        for (i, series) in self.series.iter().enumerate() {
            let colour = COLOURS[i % COLOURS.len()];
            series.draw(&mut out, &axes, colour);
            if !series.name.is_empty() {
                series.legend(&mut out, colour, at);
                at += 20.0;
            }
        }
        out.push_str("</svg>\n");
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round() {
        for (low, high, expected) in [
            (
                0.0,
                1070.0,
                &[0.0, 200.0, 400.0, 600.0, 800.0, 1000.0, 1200.0][..],
            ),
            (-54.0, 100.0, &[-100.0, -50.0, 0.0, 50.0, 100.0]),
            (0.0, 0.0, &[0.0, 0.2]),
        ] {
            let found = ticks(low, high);
            assert_eq!(found.len(), expected.len(), "{found:?}");
            for (a, b) in found.iter().zip(expected) {
                assert!((a - b).abs() < 1e-9, "{found:?}");
            }
        }
        assert_eq!(number(0.30000000000000004, 0.1), "0.3");
        assert_eq!(number(-0.0, 50.0), "0");
    }

    fn plot(is_log: bool, series: Vec<Series>) -> String {
        let [title, x_label, y_label] = ["a < b", "tokens", "nats"].map(String::from);
        Plot {
            title,
            x_label,
            y_label,
            is_log,
            series,
        }
        .svg()
    }

    fn series(name: &str, mark: Mark, points: &[(f64, f64)]) -> Series {
        Series {
            name: name.into(),
            mark,
            points: points.to_vec(),
            labels: vec![],
        }
    }

    #[test]
    fn values_have_their_places() {
        let svg = plot(
            false,
            vec![
                series("gain", Mark::Line, &[(0.0, -50.0), (100.0, 100.0)]),
                series("no number", Mark::Dots, &[(50.0, f64::NAN)]),
            ],
        );
        // A third of the height below zero: from -50 to 100.
        assert!(svg.contains("points=\"70.0,434.0 790.0,34.0\""), "{svg}");
        assert!(
            svg.contains("class=\"zero\" x1=\"70\" x2=\"790\" y1=\"300.7\""),
            "{svg}"
        );
        assert!(svg.contains(">a &lt; b<") && svg.contains(">gain<") && !svg.contains("NaN"));

        let log = plot(
            true,
            vec![series(
                "",
                Mark::Dots,
                &[(1.0, 0.01), (2.0, 1.0), (3.0, 0.0)],
            )],
        );
        assert!(
            log.contains("cy=\"434.0\"") && log.contains("cy=\"34.0\""),
            "{log}"
        );
        assert!(
            log.contains(">0.01<") && log.contains(">0.1<") && log.contains(">1<"),
            "{log}"
        );
        assert_eq!(log.matches("<circle").count(), 2);
        assert!(
            plot(true, vec![]).ends_with("</svg>\n") && plot(false, vec![]).ends_with("</svg>\n")
        );
    }

    #[test]
    fn long_lines_are_thinned() {
        let points: Vec<_> = (0..100_000).map(|i| (f64::from(i), 1.0)).collect();
        let svg = plot(false, vec![series("", Mark::Line, &points)]);
        assert!(
            svg.len() < 40_000 && svg.contains("790.0,"),
            "{}",
            svg.len()
        );
    }
}
