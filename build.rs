//! Nothing to build on the CPU path: only tells cargo what the crate depends on.
fn main() {
    println!("cargo::rerun-if-changed=build.rs");
}
