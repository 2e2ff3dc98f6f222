//! A picture of types: size against divergence.

use crate::io::size;
use std::fmt::Write;

/// A type in the picture.
pub(crate) struct Point {
    pub(crate) name: String,
    pub(crate) bytes: u64,
    /// Mean Kullback-Leibler divergence.
    pub(crate) kl: f64,
}

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 70.0;
const TOP: f64 = 30.0;

/// An SVG file: bytes from left to right, divergence upwards on a logarithmic scale, a line along the
/// types that no smaller one is better than. Divergences of 0 have no place on it and are left out.
pub(crate) fn svg(points: &[Point]) -> String {
    let mut points: Vec<&Point> = points.iter().filter(|p| p.kl > 0.0).collect();
    points.sort_by(|a, b| a.bytes.cmp(&b.bytes).then(a.kl.total_cmp(&b.kl)));
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {} {}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"{LEFT}\" y=\"16\">mean Kullback-Leibler divergence by size</text>\n",
        LEFT + WIDTH + 70.0,
        TOP + HEIGHT + 30.0,
    );
    let largest = points.iter().map(|p| p.bytes).max().unwrap_or(1) as f64;
    let decades = points.iter().map(|p| p.kl.log10());
    let low = decades.clone().fold(f64::INFINITY, f64::min).floor();
    let high = decades
        .fold(f64::NEG_INFINITY, f64::max)
        .ceil()
        .max(low + 1.0);
    let x = |bytes: f64| LEFT + WIDTH * bytes / largest;
    let y = |kl: f64| TOP + HEIGHT * (high - kl.log10()) / (high - low);
    let mut decade = low;
    while !points.is_empty() && decade <= high {
        let at = y(10f64.powf(decade));
        let _ = writeln!(
            out,
            "<line x1=\"{LEFT}\" x2=\"{}\" y1=\"{at:.1}\" y2=\"{at:.1}\" stroke=\"#dddddd\"/>\
             <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">1e{}</text>",
            LEFT + WIDTH,
            LEFT - 6.0,
            at + 4.0,
            decade as i32,
        );
        decade += 1.0;
    }
    for i in 0..=4 {
        let bytes = largest * f64::from(i) / 4.0;
        let _ = writeln!(
            out,
            "<text x=\"{:.1}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
            x(bytes),
            TOP + HEIGHT + 18.0,
            size(bytes as u64),
        );
    }
    let mut best = f64::INFINITY;
    let mut line = String::new();
    for point in &points {
        if point.kl < best {
            best = point.kl;
            let _ = write!(line, "{:.1},{:.1} ", x(point.bytes as f64), y(point.kl));
        }
    }
    let _ = writeln!(
        out,
        "<polyline fill=\"none\" stroke=\"#1f77b4\" points=\"{}\"/>",
        line.trim_end()
    );
    for point in &points {
        let (x, y) = (x(point.bytes as f64), y(point.kl));
        let _ = writeln!(
            out,
            "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"#d62728\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\">{}</text>",
            x + 5.0,
            y - 4.0,
            point.name,
        );
    }
    out.push_str("</svg>\n");
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_have_their_places() {
        let point = |name: &str, bytes, kl| Point {
            name: name.into(),
            bytes,
            kl,
        };
        let svg = svg(&[
            point("Q8_0", 1000, 0.001),
            point("Q4_0", 500, 0.1),
            point("worse", 750, 0.2),
            point("F32", 4000, 0.0),
        ]);
        // Half of the width, at the limits of the decades; what is worse is not on the line.
        assert!(svg.contains("points=\"430.0,170.0 790.0,450.0\""), "{svg}");
        assert!(svg.contains(">worse<") && !svg.contains(">F32<"));
        assert!(super::svg(&[]).ends_with("</svg>\n"));
    }
}
