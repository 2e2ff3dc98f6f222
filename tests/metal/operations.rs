//! Counts operations of shaders: LLVM's text gets, at the end of every block, an addition of how
//! many the block has. A product that is only added to something is part of a fused multiplication,
//! which counts as one.

use std::collections::HashSet;

/// Operations of an instruction per lane: one per component of what it computes. Address
/// computations by `getelementptr`, conversions between widths of integers, loads and stores are
/// none.
fn operations(instruction: &str) -> u64 {
    let value = instruction
        .split_once(" = ")
        .map_or(instruction, |(_, value)| value)
        .trim();
    let Some((opcode, rest)) = value.split_once(' ') else {
        return 0;
    };
    let components = || {
        let vector = rest
            .split('<')
            .nth(1)
            .and_then(|vector| vector.split_once(" x "));
        vector.and_then(|(n, _)| n.parse::<u64>().ok()).unwrap_or(1)
    };
    match opcode {
        "add" | "sub" | "mul" | "udiv" | "urem" | "shl" | "lshr" | "ashr" | "and" | "or"
        | "xor" | "icmp" | "fadd" | "fsub" | "fmul" | "fdiv" | "fneg" | "fcmp" | "select"
        | "sitofp" | "uitofp" | "fptoui" | "fptosi" | "fpext" | "fptrunc" => components(),
        "call" | "tail" => {
            let Some((_, called)) = rest.split_once('@') else {
                return 0;
            };
            let name = called.split('(').next().unwrap_or("");
            match name {
                "msl_reduce_float" | "msl_reduce_uint" | "msl_prefix_sum" => 10, /* five shuffles, five combinations */
                "msl_shuffle_xor" => 1,
                "expf" | "tanhf" | "sqrtf" => 4, // a quarter of the rate
                _ if is_matrix_access(name)
                    || name.starts_with("llvm.sqrt")
                    || name.starts_with("llvm.exp") =>
                {
                    4
                }
                _ if name.starts_with("llvm.lifetime") || !name.starts_with("llvm.") => 0,
                _ => components(), // minimum, maximum, fused multiplication
            }
        }
        _ => 0,
    }
}

/// Whether this is (mangled) a load or store of a matrix: an address and two elements, however the
/// emulator spells it out.
fn is_matrix_access(name: &str) -> bool {
    name.contains("simdgroup_load") || name.contains("simdgroup_store")
}

/// Values that are added or subtracted, with the number of their function.
fn added(module: &str) -> HashSet<(usize, &str)> {
    let (mut added, mut function) = (HashSet::new(), 0);
    for line in module.lines() {
        function += usize::from(line.starts_with("define "));
        if line.contains(" = fadd ") || line.contains(" = fsub ") {
            let operands = line
                .split(['=', ','])
                .skip(1)
                .filter_map(|part| part.split_whitespace().last());
            added.extend(operands.map(|name| (function, name)));
        }
    }
    added
}

/// The module with counting code.
pub(crate) fn counted(module: &str) -> String {
    let mut text = String::new();
    let (mut inside, mut count, mut blocks) = (false, 0, 0);
    let mut in_switch = false;
    let added = added(module);
    let mut function = 0;
    for line in module.lines() {
        let code = line.trim_start();
        let opcode = code.split(' ').next().unwrap_or("");
        if line.starts_with("define ") {
            (inside, count) = (!is_matrix_access(line), 0);
            function += 1;
        } else if line.starts_with('}') {
            inside = false;
        } else if inside && !in_switch {
            if ["br", "ret", "switch", "unreachable"].contains(&opcode) {
                blocks += 1;
                text += &format!(
                    "  %before.{blocks} = load i64, ptr @msl_operations\n  %after.{blocks} = add i64 %before.{blocks}, \
                     {count}\n  store i64 %after.{blocks}, ptr @msl_operations\n"
                );
                count = 0;
                in_switch = opcode == "switch" && !code.ends_with(']');
            } else {
                let name = code.split_once(" = fmul").map(|(name, _)| name);
                if !name.is_some_and(|name| added.contains(&(function, name))) {
                    count += operations(code);
                }
            }
        } else if in_switch && code.starts_with(']') {
            in_switch = false;
        }
        text += line;
        text += "\n";
    }
    text + "@msl_operations = external global i64\n"
}
