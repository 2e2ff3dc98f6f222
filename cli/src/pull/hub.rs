//! Hugging Face's hub over HTTP: what files a model has, and their bytes.
//!
//! Nothing that a server says is believed further than needed: sizes are those of the listing, and
//! bytes count once their SHA-256 is that of the listing; addresses are those of the hub, over
//! https, unless the user named another.

use crate::io::{Failure, note};
use ruvllm::gguf::GgufError;
use ruvllm::gguf::Header;
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

/// TLS as every client of the program speaks it: the system's where it has one, and whom the system
/// trusts.
pub(crate) fn tls() -> TlsConfig {
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

/// The files of a model at a commit.
pub(super) struct Listing {
    /// `OWNER/NAME`.
    pub(super) repo: String,
    pub(super) commit: String,
    pub(super) files: Vec<HubFile>,
}

/// A large file on the hub.
pub(super) struct HubFile {
    /// Path in the repository, with slashes.
    pub(super) path: String,
    pub(super) bytes: u64,
    /// 64 hexadecimal digits.
    pub(super) sha256: String,
}

fn failure(what: &str, why: impl std::fmt::Display) -> Failure {
    Failure::Work(format!("{what}: {why}"))
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
    pub(super) fn new(hosts: &[String]) -> Result<Hub, Failure> {
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let endpoint = variable("HF_ENDPOINT").unwrap_or_else(|| ENDPOINT.into());
        let wrong = || Failure::Usage(format!("HF_ENDPOINT={endpoint}: expected https://HOST"));
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
    ) -> Result<Response<Body>, Failure> {
        let url = format!("{}{path}", self.endpoint.to_string().trim_end_matches('/'));
        let mut uri: Uri = url.parse().map_err(|error| failure(&url, error))?;
        for _ in 0..=MAX_REDIRECTS {
            if !self.is_allowed(&uri) {
                let why = "the hub leads to an address that is not its own, or not over https; --allow-host HOST allows it";
                return Err(failure(
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
                failure(&format!("https://{}", uri.host().unwrap_or("")), error)
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
                    uri = absolute
                        .parse()
                        .map_err(|error| failure(&url, format!("leads to {to:?}: {error}")))?;
                }
                StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                    let why = "the hub does not let you: does the model exist? If so, accept its terms there, and set HF_TOKEN";
                    return Err(failure(&url, why));
                }
                StatusCode::NOT_FOUND => {
                    return Err(failure(&url, "there is no such thing on the hub"));
                }
                status => {
                    return Err(failure(
                        &url,
                        format!("the hub answers with status {status}"),
                    ));
                }
            }
        }
        Err(failure(&url, "it leads from address to address"))
    }

    /// The GGUF files of a model.
    pub(super) fn list(&self, repo: &str, revision: &str) -> Result<Listing, Failure> {
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
            .map_err(|error| failure(repo, format!("the hub's list of its files: {error}")))?;
        let commit = hex(value["sha"].as_str(), 40)
            .ok_or_else(|| failure(repo, "the hub names no commit"))?;
        let mut files = Vec::new();
        for file in value["siblings"].as_array().into_iter().flatten() {
            let Some(path) = file["rfilename"]
                .as_str()
                .filter(|path| path.ends_with(".gguf"))
            else {
                continue;
            };
            if !is_sound(path) {
                return Err(failure(repo, format!("{path:?} is no name of a file")));
            }
            let lfs = &file["lfs"];
            let (Some(bytes), Some(sha256)) =
                (lfs["size"].as_u64(), hex(lfs["sha256"].as_str(), 64))
            else {
                return Err(failure(
                    repo,
                    format!("the hub tells no size and SHA-256 of {path}"),
                ));
            };
            files.push(HubFile {
                path: path.to_owned(),
                bytes,
                sha256,
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
    ) -> Result<impl Read, Failure> {
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
            return Err(failure(&file.path, why));
        }
        Ok(response.into_body().into_reader().take(to - from))
    }

    /// The header of a file.
    pub(super) fn header(&self, listing: &Listing, file: &HubFile) -> Result<Header, Failure> {
        let mut want = FIRST_HEADER;
        loop {
            let to = want.min(file.bytes);
            let mut prefix = Vec::new();
            self.bytes(listing, file, 0, to)?
                .read_to_end(&mut prefix)
                .map_err(|error| failure(&file.path, error))?;
            match Header::parse(&prefix, file.bytes) {
                Err(GgufError::HeaderIncomplete { need, .. })
                    if to < file.bytes && want < MAX_HEADER =>
                {
                    want = need.max(4 * want).min(MAX_HEADER);
                }
                other => return other.map_err(|error| failure(&file.path, error)),
            }
        }
    }

    /// Gives the bytes of a file from `from` on to `write`, with how many there are then. Goes on
    /// where a connection broke off.
    pub(super) fn download(
        &self,
        listing: &Listing,
        file: &HubFile,
        from: u64,
        mut write: impl FnMut(&[u8], u64) -> io::Result<()>,
    ) -> Result<(), Failure> {
        let (mut at, mut buffer, mut n_attempts) = (from, vec![0; 1 << 16], 0);
        while at < file.bytes {
            let begun = at;
            let broken = match self.bytes(listing, file, at, file.bytes) {
                Ok(mut body) => loop {
                    match body.read(&mut buffer) {
                        Ok(0) => {
                            break failure(
                                &file.path,
                                format!("the connection ended after {at} of {} bytes", file.bytes),
                            );
                        }
                        Ok(n) => {
                            at += n as u64;
                            write(&buffer[..n], at).map_err(|error| failure(&file.path, error))?;
                            if at == file.bytes {
                                return Ok(());
                            }
                        }
                        Err(error) => break failure(&file.path, error),
                    }
                },
                Err(error) => error,
            };
            n_attempts = if at > begun { 0 } else { n_attempts + 1 };
            if n_attempts >= MAX_ATTEMPTS {
                return Err(broken);
            }
            note(format!("{}; trying again", broken.into_text()));
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
