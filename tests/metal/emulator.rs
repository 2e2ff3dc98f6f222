//! Builds the emulator with clang and talks to it as a child process, whose protocol
//! `emulator/main.cpp` describes.

use crate::{operations, shaders};
use ruvllm::gpu::check::{Handle, Stage};
use ruvllm::gpu::kernels::Dispatch;
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::io::{BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Parts of the emulator that do not depend on shaders.
const PARTS: &[&str] = &["threads.cpp", "memory.cpp", "main.cpp"];

/// Of code that is checked: the pass that reports accesses (its runtime is ours), undefined
/// behaviour, line numbers.
const CHECKED: &[&str] = &[
    "-O1",
    "-g1",
    "-gdwarf-4",
    "-fno-vectorize",
    "-fno-slp-vectorize",
    "-fsanitize=thread",
    "-mllvm",
    "-tsan-instrument-func-entry-exit=0",
    "-mllvm",
    "-tsan-instrument-read-before-write=1",
    "-fsanitize=alignment,array-bounds,shift-exponent,integer-divide-by-zero",
    "-fsanitize-recover=all",
];

/// Of code whose operations are counted: optimised as for a GPU that has fused multiplication, and
/// no more checks.
const COUNTED: &[&str] = &[
    "-O2",
    "-fno-vectorize",
    "-fno-slp-vectorize",
    "-ffp-contract=fast",
    "-mllvm",
    "-disable-vector-combine",
    "-fsanitize=thread",
    "-mllvm",
    "-tsan-instrument-func-entry-exit=0",
    "-mllvm",
    "-tsan-instrument-read-before-write=1",
    "-DMSL_COUNTED",
    "-S",
    "-emit-llvm",
];

/// clang++ of version 17 or later (`_Float16` in C++): `CLANGXX`, or what is installed.
fn clang() -> &'static str {
    static CLANG: OnceLock<String> = OnceLock::new();
    CLANG.get_or_init(|| {
        let given = std::env::var("CLANGXX").ok();
        let known = (17..=22)
            .rev()
            .map(|v| format!("clang++-{v}"))
            .chain(["clang++".to_string()]);
        given
            .into_iter()
            .chain(known)
            .find(|clang| {
                Command::new(clang)
                    .arg("--version")
                    .output()
                    .is_ok_and(|o| o.status.success())
            })
            .expect("clang++ 17 or later is needed (`bash .ci/install` gets it, CLANGXX names it)")
    })
}

fn emulator_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/metal/emulator")
}

/// Where compiled things are kept between runs.
fn cache() -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("metal");
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

fn hash_of(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

fn clang_run(arguments: &[&str]) -> Result<(), String> {
    let common = [
        "-std=c++20",
        "-fno-exceptions",
        "-fno-rtti",
        "-ffp-contract=off",
        "-Wno-unknown-attributes",
    ];
    let cpu: &[&str] = if cfg!(target_arch = "x86_64") {
        &["-march=x86-64-v3"]
    } else {
        &[]
    };
    let output = Command::new(clang())
        .args(common)
        .args(cpu)
        .args(arguments)
        .output()
        .unwrap();
    if output.status.success() {
        Ok(())
    } else {
        Err(String::from_utf8_lossy(&output.stderr).into_owned())
    }
}

/// Makes `cache()/name` by `make` unless it is there; files appear whole.
fn cached(name: &str, make: impl FnOnce(&str) -> Result<(), String>) -> Result<PathBuf, String> {
    static UNIQUE: AtomicUsize = AtomicUsize::new(0);
    let path = cache().join(name);
    if !path.exists() {
        let unique = UNIQUE.fetch_add(1, Ordering::Relaxed);
        let unfinished = cache().join(format!("{}.{}.{unique}", name, std::process::id()));
        make(unfinished.to_str().unwrap())?;
        if std::fs::rename(&unfinished, &path).is_err() {
            // Another thread was first; a folder is not replaced by a folder.
            assert!(path.exists(), "{}", path.display());
            std::fs::remove_dir_all(&unfinished).unwrap();
        }
    }
    Ok(path)
}

/// What is compiled: shaders as they lie in the source, or one of them changed.
#[derive(Clone, Copy, Default)]
pub(crate) struct Build<'a> {
    /// A file and the text that takes its place.
    pub(crate) change: Option<(&'a str, &'a str)>,
    /// Keeps only the kernels of one weight format.
    pub(crate) format: Option<&'a str>,
    /// Checks types and address spaces and makes nothing.
    pub(crate) types: bool,
    /// Counts operations.
    pub(crate) counted: bool,
}

impl Build<'_> {
    fn translate(&self, file: &str, text: &str) -> Result<String, String> {
        let text = self
            .change
            .filter(|change| change.0 == file)
            .map_or(text, |change| change.1);
        Ok(shaders::translate(file, text, self.types, self.format)?.text)
    }
}

/// The translated headers, in a folder of their own.
fn headers(build: Build<'_>) -> Result<PathBuf, String> {
    let texts: Vec<(String, String)> = shaders::files("h")
        .into_iter()
        .map(|(file, text)| Ok((file.clone(), build.translate(&file, &text)?)))
        .collect::<Result<_, String>>()?;
    let folder = format!("headers-{:016x}", hash_of(&texts));
    cached(&folder, |to| {
        std::fs::create_dir_all(to).unwrap();
        for (file, text) in &texts {
            std::fs::write(Path::new(to).join(file), text).unwrap();
        }
        Ok(())
    })
}

fn emulator_sources() -> Vec<(String, String)> {
    [
        "msl.h",
        "emulator.h",
        "metal_stdlib",
        "metal_simdgroup_matrix",
    ]
    .iter()
    .chain(PARTS)
    .map(|file| {
        (
            file.to_string(),
            std::fs::read_to_string(emulator_folder().join(file)).unwrap(),
        )
    })
    .collect()
}

/// Compiles a shader.
fn compile_shader(file: &str, text: &str, build: Build<'_>) -> Result<PathBuf, String> {
    let (sources, emulator) = (emulator_sources(), emulator_folder());
    let headers = headers(build)?;
    let translated = build.translate(file, text)?;
    let key = hash_of(&(
        &translated,
        &headers,
        build.types,
        build.counted,
        &sources,
        CHECKED,
        COUNTED,
        clang(),
    ));
    let source = cached(&format!("{key:016x}.cpp"), |to| {
        std::fs::write(to, &translated).map_err(|e| e.to_string())
    })?;
    let input = [
        "-I",
        headers.to_str().unwrap(),
        "-I",
        emulator.to_str().unwrap(),
        source.to_str().unwrap(),
    ];
    cached(&format!("{key:016x}.o"), |to| {
        if build.types {
            clang_run(&[&["-fsyntax-only", "-DMSL_TYPES"], &input[..]].concat())?;
            return std::fs::write(to, "").map_err(|e| e.to_string());
        }
        if build.counted {
            let assembly = format!("{to}.ll");
            clang_run(&[COUNTED, &["-o", &assembly], &input[..]].concat())?;
            let text = operations::counted(&std::fs::read_to_string(&assembly).unwrap());
            std::fs::write(&assembly, text).unwrap();
            clang_run(&["-O1", "-c", "-o", to, &assembly])?;
            return std::fs::remove_file(assembly).map_err(|e| e.to_string());
        }
        clang_run(&[CHECKED, &["-c", "-o", to], &input[..]].concat())
    })
}

fn link(objects: &[PathBuf]) -> Result<PathBuf, String> {
    let sources = emulator_sources();
    let key = hash_of(&(objects, &sources, clang()));
    let mut inputs = objects.to_vec();
    for part in PARTS {
        let source = emulator_folder().join(part);
        let key = hash_of(&(part, &sources, clang()));
        inputs.push(cached(&format!("{key:016x}.o"), |to| {
            clang_run(&["-O2", "-g1", "-c", "-o", to, source.to_str().unwrap()])
        })?);
    }
    cached(&format!("emulator-{key:016x}"), |to| {
        let inputs: Vec<&str> = inputs.iter().map(|path| path.to_str().unwrap()).collect();
        clang_run(
            &[
                &["-no-pie", "-lstdc++", "-o", to],
                &inputs[..],
                &["-lstdc++", "-lm"],
            ]
            .concat(),
        )
    })
}

/// The emulator with all shaders, built once for all tests.
pub(crate) fn build_all() -> Result<PathBuf, String> {
    static BUILT: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    BUILT.get_or_init(compile_all).clone()
}

fn compile_all() -> Result<PathBuf, String> {
    let files = shaders::files("metal");
    let next = AtomicUsize::new(0);
    let threads = std::thread::available_parallelism()
        .map_or(2, usize::from)
        .min(files.len());
    let objects: Vec<Result<(usize, PathBuf), String>> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|_| {
                scope.spawn(|| {
                    let mut objects = Vec::new();
                    loop {
                        let i = next.fetch_add(1, Ordering::Relaxed);
                        let Some((file, text)) = files.get(i) else {
                            return objects;
                        };
                        let typed = compile_shader(
                            file,
                            text,
                            Build {
                                types: true,
                                ..Build::default()
                            },
                        );
                        let object =
                            typed.and_then(|_| compile_shader(file, text, Build::default()));
                        objects.push(object.map(|object| (i, object)));
                    }
                })
            })
            .collect();
        workers
            .into_iter()
            .flat_map(|worker| worker.join().unwrap())
            .collect()
    });
    let mut objects: Vec<(usize, PathBuf)> = objects.into_iter().collect::<Result<_, _>>()?;
    objects.sort();
    link(
        &objects
            .into_iter()
            .map(|(_, object)| object)
            .collect::<Vec<_>>(),
    )
}

/// The emulator with one shader; nothing is linked where only types are checked.
pub(crate) fn build_one(file: &str, build: Build<'_>) -> Result<PathBuf, String> {
    build_text(
        file,
        &std::fs::read_to_string(shaders::folder().join(file)).unwrap(),
        build,
    )
}

/// The same of any text.
pub(crate) fn build_text(file: &str, text: &str, build: Build<'_>) -> Result<PathBuf, String> {
    let object = compile_shader(file, text, build)?;
    if build.types {
        Ok(object)
    } else {
        link(&[object])
    }
}

/// What a dispatch took.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counters {
    /// Bytes of device memory read, each once per threadgroup.
    pub(crate) distinct_read: u64,
    /// The same, each once.
    pub(crate) unique_read: u64,
    /// Bytes of device memory written.
    pub(crate) written: u64,
    /// Operations of all lanes.
    pub(crate) operations: u64,
    /// Products of 8 × 8 matrices.
    pub(crate) multiplied: u64,
}

/// A running emulator.
pub(crate) struct Emulator {
    child: Child,
    to: Option<ChildStdin>,
    from: BufReader<ChildStdout>,
    buffers: u32,
    /// Shuffles threads and threadgroups of what is dispatched, unless 0.
    pub(crate) seed: u32,
    /// Of the last dispatch.
    pub(crate) counters: Counters,
}

impl Emulator {
    pub(crate) fn start(program: &Path) -> Emulator {
        let mut child = Command::new(program)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (to, from) = (
            child.stdin.take(),
            BufReader::new(child.stdout.take().unwrap()),
        );
        Emulator {
            child,
            to,
            from,
            buffers: 0,
            seed: 0,
            counters: Counters::default(),
        }
    }

    fn send(&mut self, bytes: &[u8]) {
        self.to.as_mut().unwrap().write_all(bytes).unwrap();
    }

    fn receive<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        self.from
            .read_exact(&mut bytes)
            .expect("the emulator has ended");
        bytes
    }

    fn receive_text(&mut self) -> Vec<u8> {
        let mut bytes = vec![0; u64::from_le_bytes(self.receive()) as usize];
        self.from.read_exact(&mut bytes).unwrap();
        bytes
    }

    fn make(&mut self, bytes: u64, align: u64, data: Option<&[u8]>) -> Handle {
        self.buffers += 1;
        let mut message = vec![b'B'];
        message.extend(self.buffers.to_le_bytes());
        message.extend(bytes.to_le_bytes());
        message.extend((align as u32).to_le_bytes());
        message.push(data.is_some().into());
        message.extend(data.unwrap_or_default());
        self.send(&message);
        Handle(self.buffers)
    }

    /// A buffer that is the file at `path`, and its address.
    pub(crate) fn shared(&mut self, bytes: u64, path: &Path) -> (Handle, u64) {
        self.buffers += 1;
        let mut message = vec![b'S'];
        message.extend(self.buffers.to_le_bytes());
        message.extend(bytes.to_le_bytes());
        let path = path.to_str().unwrap().as_bytes();
        message.extend((path.len() as u64).to_le_bytes());
        message.extend(path);
        self.send(&message);
        (Handle(self.buffers), u64::from_le_bytes(self.receive()))
    }

    /// Takes all of a buffer for written.
    pub(crate) fn take_for_written(&mut self, id: Handle) {
        self.send(&[&b"I"[..], &id.0.to_le_bytes()].concat());
    }

    /// Forgets a buffer.
    pub(crate) fn forget(&mut self, id: Handle) {
        self.send(&[&b"X"[..], &id.0.to_le_bytes()].concat());
    }

    /// Dispatches with parts of buffers (offset and bytes), and `pages` that are reached through
    /// addresses.
    pub(crate) fn run_parts(
        &mut self,
        d: &Dispatch,
        buffers: &[(Handle, u64, u64)],
        pages: &[Handle],
    ) -> Result<(), String> {
        fn text(message: &mut Vec<u8>, bytes: &[u8]) {
            message.extend((bytes.len() as u64).to_le_bytes());
            message.extend(bytes);
        }
        let mut message = vec![b'D'];
        text(&mut message, d.kernel().as_bytes());
        message.extend((buffers.len() as u32).to_le_bytes());
        for (id, offset, bytes) in buffers {
            message.extend(id.0.to_le_bytes());
            message.extend(offset.to_le_bytes());
            message.extend(bytes.to_le_bytes());
        }
        message.extend((pages.len() as u32).to_le_bytes());
        pages
            .iter()
            .for_each(|id| message.extend(id.0.to_le_bytes()));
        text(&mut message, &d.args);
        d.grid.iter().for_each(|n| message.extend(n.to_le_bytes()));
        message.extend(d.threads.to_le_bytes());
        message.extend(self.seed.to_le_bytes());
        self.send(&message);
        let report = self.receive_text();
        let [
            distinct_read,
            unique_read,
            written,
            operations,
            multiplied,
            threadgroup_bytes,
        ] = std::array::from_fn(|_| u64::from_le_bytes(self.receive()));
        self.counters = Counters {
            distinct_read,
            unique_read,
            written,
            operations,
            multiplied,
        };
        if !report.is_empty() {
            return Err(format!(
                "{}: {}",
                d.kernel(),
                String::from_utf8_lossy(&report)
            ));
        }
        // Known from the first thread that reaches a declaration.
        if threadgroup_bytes != 0 && threadgroup_bytes != u64::from(d.threadgroup_bytes) {
            let declared = d.threadgroup_bytes;
            return Err(format!(
                "{}: {threadgroup_bytes} bytes of threadgroup memory, {declared} declared",
                d.kernel()
            ));
        }
        Ok(())
    }

    /// Waits until what was dispatched is finished.
    pub(crate) fn fence(&mut self) {
        self.send(b"F");
    }

    /// The first bytes of a buffer, written or not.
    pub(crate) fn peek(&mut self, id: Handle) -> Vec<u8> {
        self.send(&[&b"R"[..], &id.0.to_le_bytes()].concat());
        let [_] = self.receive();
        self.receive_text()
    }
}

impl Stage for Emulator {
    fn filled(&mut self, data: &[u8], align: u64) -> Handle {
        self.make(data.len() as u64, align, Some(data))
    }

    fn empty(&mut self, bytes: u64, align: u64) -> Handle {
        self.make(bytes, align, None)
    }

    fn fill(&mut self, id: Handle, offset: u64, data: &[u8]) {
        let mut message = vec![b'W'];
        message.extend(id.0.to_le_bytes());
        message.extend(offset.to_le_bytes());
        message.extend((data.len() as u64).to_le_bytes());
        message.extend(data);
        self.send(&message);
    }

    fn point(&mut self, into: Handle, offset: u64, target: Handle) {
        let mut message = vec![b'P'];
        message.extend(into.0.to_le_bytes());
        message.extend(offset.to_le_bytes());
        message.extend(target.0.to_le_bytes());
        self.send(&message);
    }

    fn read(&mut self, id: Handle) -> Result<Vec<u8>, String> {
        let mut message = vec![b'R'];
        message.extend(id.0.to_le_bytes());
        self.send(&message);
        let [status] = self.receive();
        let data = self.receive_text();
        if status == 0 {
            Ok(data)
        } else {
            Err("result: some of it was never written".to_string())
        }
    }

    fn run(&mut self, d: &Dispatch, buffers: &[Handle], pages: &[Handle]) -> Result<(), String> {
        let whole: Vec<_> = buffers
            .iter()
            .map(|&buffer| (buffer, 0, u64::MAX))
            .collect();
        self.run_parts(d, &whole, pages)?;
        self.fence();
        Ok(())
    }

    fn shuffle(&mut self, seed: u32) {
        self.seed = seed;
    }
}

impl Drop for Emulator {
    fn drop(&mut self) {
        drop(self.to.take()); // ends the child
        let _ = self.child.wait();
    }
}
