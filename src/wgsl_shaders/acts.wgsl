// Activations of products.

// Values 4 * i .. + 4 of the row of n values at `at` of `x`; zeros after its end.
fn act4(at: u32, i: u32, n: u32) -> vec4<f32> {
//! if WIDE
    return x[at / 4u + i];
//! else
    var values = vec4<f32>();
//! for c < 4
    if (4u * i + $cu < n) {
        values[$c] = x[at + 4u * i + $cu];
    }
//! end
    return values;
//! end
}

// Values 16 * i .. + 16.
fn acts(at: u32, i: u32, n: u32) -> mat4x4<f32> {
    return mat4x4<f32>(act4(at, 4u * i, n), act4(at, 4u * i + 1u, n), act4(at, 4u * i + 2u, n), act4(at, 4u * i + 3u, n));
}
