//! Hugging Face's hub over HTTP: what files a model has, and their bytes.
//!
//! Nothing that a server says is believed further than needed: sizes are those of the listing, and
//! bytes count once their SHA-256 is that of the listing; addresses are those of the hub, over
//! https, unless the user named another.

use super::error::HubError;
use crate::gguf::{GgufError, Header};
use serde_json::Value;
use std::io::{self, Read};
use std::path::PathBuf;
use std::time::Duration;
use ureq::http::{Response, StatusCode, Uri, header};
use ureq::tls::{RootCerts, TlsConfig, TlsProvider};
use ureq::{Agent, Body};

const ENDPOINT: &str = "https://huggingface.co";
/// Their subdomains are the hub's, too: the files lie on some of them.
const HOSTS: &[&str] = &["huggingface.co", "hf.co"];
/// Most bytes of a listing.
const MAX_LISTING: u64 = 32 << 20;
/// Most bytes of a header, and how many are asked for first.
const MAX_HEADER: u64 = 256 << 20;
const FIRST_HEADER: u64 = 1 << 20;
/// Addresses that a request may lead through.
const MAX_REDIRECTS: usize = 5;
/// Attempts of a download that bring nothing.
const MAX_ATTEMPTS: u32 = 5;

/// TLS as every client of this crate speaks it: the system's where it has one, and whom the system
/// trusts.
pub fn tls() -> TlsConfig {
    let provider = if cfg!(any(windows, target_vendor = "apple")) {
        TlsProvider::NativeTls
    } else {
        TlsProvider::Rustls
    };
    TlsConfig::builder()
        .provider(provider)
        .root_certs(RootCerts::PlatformVerifier)
        .build()
}

/// The hub, with what may be asked of whom.
pub(super) struct Hub {
    agent: Agent,
    endpoint: Uri,
    token: Option<String>,
    /// Hosts that the user allows besides.
    hosts: Vec<String>,
}

/// A variable of the environment that is set.
pub(super) fn variable(name: &str) -> Option<PathBuf> {
    std::env::var_os(name)
        .filter(|value| !value.is_empty())
        .map(PathBuf::from)
}

/// Where Hugging Face's tools keep everything.
pub(super) fn home() -> Option<PathBuf> {
    let cache =
        || variable("XDG_CACHE_HOME").or_else(|| Some(std::env::home_dir()?.join(".cache")));
    variable("HF_HOME").or_else(|| Some(cache()?.join("huggingface")))
}

/// Files of a model at a commit.
pub(super) struct Listing {
    /// `OWNER/NAME`.
    pub(super) repo: String,
    pub(super) commit: String,
    pub(super) files: Vec<HubFile>,
}

/// File on the hub.
pub(super) struct HubFile {
    /// Path in the repository, with slashes.
    pub(super) path: String,
    pub(super) bytes: u64,
    /// Hexadecimal digits, which are the name of its bytes in the cache, too: 64 of a large file's
    /// SHA-256, or 40 of a small one's SHA-1 as git computes it.
    pub(super) sum: String,
}

/// Whether a file of this path belongs to a model: GGUF files everywhere, those of a checkpoint at
/// the top and in the numbered folders of sentence-transformers.
fn is_of_model(path: &str) -> bool {
    if path.ends_with(".gguf") {
        return true;
    }
    let file = match path.split_once('/') {
        Some((folder, file)) if folder.starts_with(|c: char| c.is_ascii_digit()) => file,
        Some(_) => return false,
        None => path,
    };
    !file.contains('/')
        && !file.starts_with('.')
        && file.rsplit_once('.').is_some_and(|(_, kind)| {
            ["safetensors", "json", "jinja", "model", "txt", "tiktoken"].contains(&kind)
        })
}

/// `text` if it is `n` hexadecimal digits.
fn hex(text: Option<&str>, n: usize) -> Option<String> {
    text.filter(|text| text.len() == n && text.bytes().all(|b| b.is_ascii_hexdigit()))
        .map(str::to_ascii_lowercase)
}

/// Whether a path leads to a file below a folder, on every system.
fn is_sound(path: &str) -> bool {
    let part =
        |part: &str| !part.is_empty() && !part.starts_with('.') && !part.ends_with(['.', ' ']);
    let is_odd = |c: char| c.is_control() || "\\:*?\"<>|%#".contains(c);
    path.len() <= 255 && path.split('/').all(part) && !path.contains(is_odd)
}

impl Hub {
    /// The hub of the environment; `hosts` may serve files, too.
    pub(super) fn new(hosts: &[String]) -> Result<Hub, HubError> {
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let endpoint = variable("HF_ENDPOINT").unwrap_or_else(|| ENDPOINT.into());
        let wrong = || HubError::Asked(format!("HF_ENDPOINT={endpoint}: expected https://HOST"));
        let endpoint: Uri = endpoint
            .trim_end_matches('/')
            .parse()
            .map_err(|_| wrong())?;
        if !matches!(endpoint.scheme_str(), Some("https" | "http")) || endpoint.host().is_none() {
            return Err(wrong());
        }
        let of_file = || {
            let path = variable("HF_TOKEN_PATH")
                .map(Into::into)
                .or_else(|| Some(home()?.join("token")));
            std::fs::read_to_string(path?).ok()
        };
        let token = variable("HF_TOKEN")
            .or_else(of_file)
            .map(|token| token.trim().to_owned());
        let config = Agent::config_builder()
            .tls_config(tls())
            .user_agent(concat!("ruvllm/", env!("CARGO_PKG_VERSION")))
            .http_status_as_error(false)
            // Each address is looked at first.
            .max_redirects(0)
            .max_redirects_will_error(false)
            .timeout_resolve(Some(Duration::from_secs(30)))
            .timeout_connect(Some(Duration::from_secs(30)))
            .timeout_recv_response(Some(Duration::from_secs(60)))
            .timeout_per_read(Some(Duration::from_secs(60)));
        let token = token.filter(|token| !token.is_empty());
        Ok(Hub {
            agent: config.build().new_agent(),
            endpoint,
            token,
            hosts: hosts.to_vec(),
        })
    }

    /// Whether an address may be asked.
    fn is_allowed(&self, uri: &Uri) -> bool {
        let Some(host) = uri.host() else { return false };
        let same =
            |other: &Uri| uri.scheme() == other.scheme() && uri.authority() == other.authority();
        let ours = HOSTS.iter().any(|ours| {
            host == *ours
                || host
                    .strip_suffix(ours)
                    .is_some_and(|sub| sub.ends_with('.'))
        });
        same(&self.endpoint)
            || (uri.scheme_str() == Some("https")
                && (ours || self.hosts.iter().any(|told| told == host)))
    }

    /// Asks for what is at a path of the hub, from byte `range.0` on to `range.1`, wherever that
    /// leads.
    fn get(
        &self,
        path: &str,
        range: Option<(u64, Option<u64>)>,
    ) -> Result<Response<Body>, HubError> {
        let url = format!("{}{path}", self.endpoint.to_string().trim_end_matches('/'));
        let mut uri: Uri = url.parse().map_err(|error| HubError::answer(&url, error))?;
        for _ in 0..=MAX_REDIRECTS {
            if !self.is_allowed(&uri) {
                let why = "the hub leads to an address that is not its own, or not over https: allow its host (--allow-host)";
                return Err(HubError::answer(
                    &format!(
                        "{}://{}",
                        uri.scheme_str().unwrap_or(""),
                        uri.authority().map_or("", |a| a.as_str())
                    ),
                    why,
                ));
            }
            let mut request = self.agent.get(uri.clone());
            if let Some((from, to)) = range {
                let to = to.map(|to| to.to_string()).unwrap_or_default();
                request = request.header(header::RANGE, format!("bytes={from}-{to}"));
            }
            // Whoever keeps the files does not learn the token.
            if let Some(token) = self
                .token
                .as_ref()
                .filter(|_| uri.authority() == self.endpoint.authority())
            {
                request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
            }
            let response = request.call().map_err(|error| {
                HubError::answer(&format!("https://{}", uri.host().unwrap_or("")), error)
            })?;
            match response.status() {
                status if status.is_success() => return Ok(response),
                status if status.is_redirection() => {
                    let to = response
                        .headers()
                        .get(header::LOCATION)
                        .and_then(|to| to.to_str().ok())
                        .unwrap_or("");
                    let absolute = if to.starts_with('/') && !to.starts_with("//") {
                        format!(
                            "{}://{}{to}",
                            uri.scheme_str().unwrap_or(""),
                            uri.authority().map_or("", |a| a.as_str())
                        )
                    } else {
                        to.to_owned()
                    };
                    uri = absolute.parse().map_err(|error| {
                        HubError::answer(&url, format!("leads to {to:?}: {error}"))
                    })?;
                }
                StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                    let why = "the hub does not let you: does the model exist? If so, accept its terms there, and set HF_TOKEN";
                    return Err(HubError::answer(&url, why));
                }
                StatusCode::NOT_FOUND => {
                    return Err(HubError::answer(&url, "there is no such thing on the hub"));
                }
                status => {
                    return Err(HubError::answer(
                        &url,
                        format!("the hub answers with status {status}"),
                    ));
                }
            }
        }
        Err(HubError::answer(&url, "it leads from address to address"))
    }

    /// The files of a model.
    pub(super) fn list(&self, repo: &str, revision: &str) -> Result<Listing, HubError> {
        let mut response = self.get(
            &format!("/api/models/{repo}/revision/{revision}?blobs=true"),
            None,
        )?;
        let text = response
            .body_mut()
            .with_config()
            .limit(MAX_LISTING)
            .read_to_string();
        let value: Value = text
            .map_err(|error| error.to_string())
            .and_then(|text| serde_json::from_str(&text).map_err(|error| error.to_string()))
            .map_err(|error| {
                HubError::answer(repo, format!("the hub's list of its files: {error}"))
            })?;
        let commit = hex(value["sha"].as_str(), 40)
            .ok_or_else(|| HubError::answer(repo, "the hub names no commit"))?;
        let mut files = Vec::new();
        for file in value["siblings"].as_array().into_iter().flatten() {
            let Some(path) = file["rfilename"].as_str().filter(|path| is_of_model(path)) else {
                continue;
            };
            if !is_sound(path) {
                return Err(HubError::answer(
                    repo,
                    format!("{path:?} is no name of a file"),
                ));
            }
            let lfs = &file["lfs"];
            let (bytes, sum) = if lfs.is_object() {
                (lfs["size"].as_u64(), hex(lfs["sha256"].as_str(), 64))
            } else {
                (file["size"].as_u64(), hex(file["blobId"].as_str(), 40))
            };
            let (Some(bytes), Some(sum)) = (bytes, sum) else {
                return Err(HubError::answer(
                    repo,
                    format!("the hub tells no size and SHA-256 of {path}"),
                ));
            };
            files.push(HubFile {
                path: path.to_owned(),
                bytes,
                sum,
            });
        }
        Ok(Listing {
            repo: repo.to_owned(),
            commit,
            files,
        })
    }

    /// The bytes of a file from `from` on, `to` not included; the server has to agree about its
    /// size.
    fn bytes(
        &self,
        listing: &Listing,
        file: &HubFile,
        from: u64,
        to: u64,
    ) -> Result<impl Read, HubError> {
        let path = format!(
            "/{}/resolve/{}/{}",
            listing.repo,
            listing.commit,
            file.path.replace(' ', "%20")
        );
        let range = (from > 0 || to < file.bytes).then_some((from, Some(to - 1)));
        let response = self.get(&path, range)?;
        let of = |name| {
            response
                .headers()
                .get(name)
                .and_then(|value: &header::HeaderValue| value.to_str().ok())
        };
        let agrees = match (response.status(), from) {
            (StatusCode::PARTIAL_CONTENT, _) => {
                let range =
                    of(header::CONTENT_RANGE).and_then(|range| range.strip_prefix("bytes "));
                let numbers = range.and_then(|range| range.split_once('/'));
                let begin = numbers.and_then(|(range, _)| range.split('-').next()?.parse().ok());
                let total = numbers.and_then(|(_, total)| total.parse().ok());
                begin == Some(from) && total == Some(file.bytes)
            }
            // Who does not know ranges sends everything.
            (_, 0) => {
                of(header::CONTENT_LENGTH).is_none_or(|length| length.parse() == Ok(file.bytes))
            }
            _ => false,
        };
        if !agrees {
            let why = format!(
                "the server has another size than the hub's {}, or no part from byte {from} on",
                file.bytes
            );
            return Err(HubError::answer(&file.path, why));
        }
        Ok(response.into_body().into_reader().take(to - from))
    }

    /// The header of a file.
    pub(super) fn header(&self, listing: &Listing, file: &HubFile) -> Result<Header, HubError> {
        let mut want = FIRST_HEADER;
        loop {
            let to = want.min(file.bytes);
            let mut prefix = Vec::new();
            self.bytes(listing, file, 0, to)?
                .read_to_end(&mut prefix)
                .map_err(|error| HubError::answer(&file.path, error))?;
            match Header::parse(&prefix, file.bytes) {
                Err(GgufError::HeaderIncomplete { need, .. })
                    if to < file.bytes && want < MAX_HEADER =>
                {
                    want = need.max(4 * want).min(MAX_HEADER);
                }
                other => return other.map_err(|error| HubError::answer(&file.path, error)),
            }
        }
    }

    /// Gives the bytes of a file from `from` on to `write`, with how many there are then. Goes on
    /// where a connection broke off, after telling `retries` why it did.
    pub(super) fn download(
        &self,
        listing: &Listing,
        file: &HubFile,
        from: u64,
        write: &mut dyn FnMut(&[u8], u64) -> io::Result<()>,
        retries: &dyn Fn(&HubError),
    ) -> Result<(), HubError> {
        let (mut at, mut buffer, mut n_attempts) = (from, vec![0; 1 << 16], 0);
        while at < file.bytes {
            let begun = at;
            let broken = match self.bytes(listing, file, at, file.bytes) {
                Ok(mut body) => loop {
                    match body.read(&mut buffer) {
                        Ok(0) => {
                            break HubError::answer(
                                &file.path,
                                format!("the connection ended after {at} of {} bytes", file.bytes),
                            );
                        }
                        Ok(n) => {
                            at += n as u64;
                            write(&buffer[..n], at)
                                .map_err(|error| HubError::answer(&file.path, error))?;
                            if at == file.bytes {
                                return Ok(());
                            }
                        }
                        Err(error) => break HubError::answer(&file.path, error),
                    }
                },
                Err(error) => error,
            };
            n_attempts = if at > begun { 0 } else { n_attempts + 1 };
            if n_attempts >= MAX_ATTEMPTS {
                return Err(broken);
            }
            retries(&broken);
            std::thread::sleep(Duration::from_millis(200 << n_attempts));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_stay_inside() {
        for path in ["a.gguf", "BF16/a-00001-of-00002.gguf", "a (1).gguf"] {
            assert!(is_sound(path), "{path}");
        }
        for path in [
            "../a", "a/../b", "/a", "a//b", "a\\b", "C:a", "", ".a", "a/.", "a\0b", "a%2f", "a ",
            "a#b",
        ] {
            assert!(!is_sound(path), "{path}");
        }
    }

    #[test]
    fn only_the_hub_is_asked() {
        let hub = |endpoint: &'static str| {
            let agent = Agent::new_with_defaults();
            Hub {
                agent,
                endpoint: Uri::from_static(endpoint),
                token: None,
                hosts: vec!["mirror.example".into()],
            }
        };
        let usual = hub(ENDPOINT);
        let allows = |hub: &Hub, uri: &'static str| hub.is_allowed(&Uri::from_static(uri));
        for uri in [
            "https://huggingface.co/a",
            "https://cdn-lfs.hf.co/a",
            "https://us.aws.cdn.hf.co/a",
            "https://mirror.example/a",
        ] {
            assert!(allows(&usual, uri), "{uri}");
        }
        for uri in [
            "http://huggingface.co/a",
            "https://evilhf.co/a",
            "https://hf.co.evil.com/a",
            "http://mirror.example/a",
            "/a",
            "https://huggingface.co@evil.com/a",
            "ftp://hf.co/a",
            "http://127.0.0.1:80/a",
        ] {
            assert!(!allows(&usual, uri), "{uri}");
        }
        let local = hub("http://127.0.0.1:8000");
        assert!(
            allows(&local, "http://127.0.0.1:8000/a") && !allows(&local, "http://127.0.0.1:8001/a")
        );
    }
}
