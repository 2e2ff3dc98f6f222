//! Images at addresses of the network, which a server fetches for a client only where it was told
//! that it may (`--allow-image-urls`).
//!
//! A client must not reach through the server what only the server can reach. So an address is
//! fetched over https alone, from a host of the list, and each redirect is judged anew. The name is
//! resolved once: an IP address that is not public is refused, and the connection goes to the very
//! addresses that were judged. Nothing of ours is sent: no token, no proxy, no name of a program.

#[cfg(any(feature = "pull", test))]
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Hosts that may be asked, as in `example.com` or `example.com:8443`.
#[derive(Clone, Default)]
pub(crate) struct ImageHosts(Vec<String>);

impl ImageHosts {
    pub(crate) fn new(hosts: &[String]) -> ImageHosts {
        ImageHosts(hosts.iter().map(|host| host.to_ascii_lowercase()).collect())
    }

    /// The bytes at an address.
    ///
    /// # Errors
    /// What a client is told.
    pub(crate) fn get(&self, url: &str) -> Result<Vec<u8>, String> {
        if self.0.is_empty() {
            return Err(
                "the server fetches no images: send a data URL (data:image/png;base64,…), or start it with --allow-image-urls HOSTS"
                    .into(),
            );
        }
        get(self, url)
    }

    /// Whether a host with this port may be asked; without a port the list means that of https.
    #[cfg(any(feature = "pull", test))]
    fn allow(&self, host: &str, port: u16) -> bool {
        let host = host.to_ascii_lowercase();
        let with_port = format!("{host}:{port}");
        self.0
            .iter()
            .any(|known| *known == with_port || port == 443 && *known == host)
    }
}

/// Whether an address is one of the open network: not this machine's, not of a network at home or
/// in a company, and no other address in disguise.
#[cfg(any(feature = "pull", test))]
fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => is_public_v4(v4),
        IpAddr::V6(v6) => is_public_v6(v6),
    }
}

/// IPv4 without the blocks that IANA's registry of special addresses reserves.
#[cfg(any(feature = "pull", test))]
fn is_public_v4(address: Ipv4Addr) -> bool {
    let [a, b, c, _] = address.octets();
    !(address.is_private()
        || address.is_loopback()
        || address.is_link_local()
        || address.is_broadcast()
        || address.is_documentation()
        // This network, those of providers, benchmarks, protocols, relays.
        || a == 0
        || a == 100 && (64..128).contains(&b)
        || a == 198 && (18..20).contains(&b)
        || (a, b, c) == (192, 0, 0)
        || (a, b, c) == (192, 88, 99)
        // Multicast, and what is reserved.
        || a >= 224)
}

/// IPv6 of the block that is given out (2000::/3), without what wraps an IPv4 address (6to4, Teredo)
/// and documentation.
#[cfg(any(feature = "pull", test))]
fn is_public_v6(address: Ipv6Addr) -> bool {
    let [a, b, ..] = address.segments();
    let is_given_out = a & 0xe000 == 0x2000;
    let is_special = a == 0x2001 && (b < 0x0200 || b == 0x0db8) || a == 0x3fff;
    is_given_out && !is_special && a != 0x2002
}

#[cfg(feature = "pull")]
use fetch::get;

#[cfg(not(feature = "pull"))]
fn get(_: &ImageHosts, url: &str) -> Result<Vec<u8>, String> {
    Err(format!(
        "{url}: this build has no client for addresses (feature `pull`)"
    ))
}

#[cfg(feature = "pull")]
mod fetch {
    use super::{ImageHosts, is_public};
    use ruvllm::hub::tls;
    use std::time::{Duration, Instant};
    use ureq::Agent;
    use ureq::config::{AutoHeaderValue, Config};
    use ureq::http::{Uri, header};
    use ureq::unversioned::resolver::{DefaultResolver, ResolvedSocketAddrs, Resolver};
    use ureq::unversioned::transport::{DefaultConnector, NextTimeout};

    /// Most bytes of an image.
    const MAX_BYTES: u64 = 20 << 20;
    /// Longest time for all of it.
    const TIME: Duration = Duration::from_secs(10);
    /// Most redirects.
    const MAX_REDIRECTS: usize = 3;

    /// A resolver that tells public addresses alone.
    #[derive(Debug)]
    struct Public(DefaultResolver);

    impl Resolver for Public {
        fn resolve(
            &self,
            uri: &Uri,
            config: &Config,
            timeout: NextTimeout,
        ) -> Result<ResolvedSocketAddrs, ureq::Error> {
            let found = self.0.resolve(uri, config, timeout)?;
            match found.iter().all(|address| is_public(address.ip())) {
                true => Ok(found),
                false => Err(ureq::Error::Other(
                    "the host has an address that is not of the open network".into(),
                )),
            }
        }
    }

    fn agent(left: Duration) -> Agent {
        let config = Agent::config_builder()
            .tls_config(tls())
            .https_only(true)
            .proxy(None)
            .user_agent(AutoHeaderValue::None)
            .accept(AutoHeaderValue::None)
            .accept_encoding(AutoHeaderValue::None)
            .http_status_as_error(false)
            // Each address is judged first.
            .max_redirects(0)
            .max_redirects_will_error(false)
            .timeout_global(Some(left))
            .build();
        Agent::with_parts(
            config,
            DefaultConnector::default(),
            Public(DefaultResolver::default()),
        )
    }

    /// An address that may be asked.
    pub(super) fn judge(hosts: &ImageHosts, url: &str) -> Result<Uri, String> {
        let has_scheme = |scheme: &str| {
            url.get(..scheme.len())
                .is_some_and(|start| start.eq_ignore_ascii_case(scheme))
        };
        if !has_scheme("https://") {
            return Err(format!("{url:?}: only https:// is fetched"));
        }
        let uri: Uri = url
            .parse()
            .map_err(|error| format!("{url:?} is no address: {error}"))?;
        let authority = uri
            .authority()
            .ok_or_else(|| format!("{url:?} names no host"))?;
        if authority.as_str().contains('@') {
            return Err(format!("{url:?}: a name or password does not belong there"));
        }
        let (host, port) = (authority.host(), authority.port_u16().unwrap_or(443));
        if !hosts.allow(host, port) {
            return Err(format!(
                "{host}:{port} is none of the hosts that the server may ask (--allow-image-urls)"
            ));
        }
        Ok(uri)
    }

    /// Where a redirect of `from` leads.
    pub(super) fn target(from: &Uri, to: &str) -> String {
        let authority = from.authority().map_or("", |authority| authority.as_str());
        match to {
            _ if to.starts_with("//") => format!("https:{to}"),
            _ if to.starts_with('/') => format!("https://{authority}{to}"),
            _ if to.contains("://") => to.to_owned(),
            _ => {
                let folder = from
                    .path()
                    .rsplit_once('/')
                    .map_or("", |(folder, _)| folder);
                format!("https://{authority}{folder}/{to}")
            }
        }
    }

    pub(super) fn get(hosts: &ImageHosts, url: &str) -> Result<Vec<u8>, String> {
        let (begun, mut url) = (Instant::now(), url.to_owned());
        for _ in 0..=MAX_REDIRECTS {
            let uri = judge(hosts, &url)?;
            let host = uri.host().unwrap_or_default().to_owned();
            let failed = |error: ureq::Error| format!("{host}: {error}");
            let left = TIME
                .checked_sub(begun.elapsed())
                .filter(|left| !left.is_zero())
                .ok_or_else(|| {
                    format!("{host}: the image did not come within {} s", TIME.as_secs())
                })?;
            // An agent for each address: nothing of one answer is sent to another host.
            let mut response = agent(left).get(uri.clone()).call().map_err(failed)?;
            if response.status().is_redirection() {
                let to = response
                    .headers()
                    .get(header::LOCATION)
                    .and_then(|to| to.to_str().ok())
                    .ok_or_else(|| format!("{host}: a redirect to nowhere"))?;
                url = target(&uri, to);
                continue;
            }
            if !response.status().is_success() {
                return Err(format!("{host} answers with status {}", response.status()));
            }
            let body = response.body_mut().with_config().limit(MAX_BYTES);
            return body.read_to_vec().map_err(failed);
        }
        Err(format!("{url}: more than {MAX_REDIRECTS} redirects"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_open_network() {
        for public in [
            "93.184.216.34",
            "1.1.1.1",
            "2606:4700::1111",
            "2a00:1450::1",
        ] {
            assert!(is_public(public.parse().unwrap()), "{public}");
        }
        for other in [
            "127.0.0.1",
            "127.9.9.9",
            "0.0.0.0",
            "10.1.2.3",
            "172.16.0.1",
            "192.168.0.1",
            "169.254.169.254",
            "100.64.0.1",
            "198.18.0.1",
            "192.0.0.8",
            "192.0.2.1",
            "192.88.99.1",
            "224.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "fe80::1",
            "fc00::1",
            "fd12::1",
            "ff02::1",
            "::ffff:127.0.0.1",
            "::ffff:8.8.8.8",
            "64:ff9b::7f00:1",
            "2001:db8::1",
            "2001::1",
            "2002:7f00:1::1",
            "3fff::1",
        ] {
            assert!(!is_public(other.parse().unwrap()), "{other}");
        }
    }

    #[test]
    fn hosts_are_named() {
        let hosts = ImageHosts::new(&["Example.com".into(), "other.org:8443".into()]);
        assert!(hosts.allow("example.COM", 443) && hosts.allow("other.org", 8443));
        for (host, port) in [
            ("example.com", 8443),
            ("other.org", 443),
            ("www.example.com", 443),
            ("example.com.evil.org", 443),
        ] {
            assert!(!hosts.allow(host, port), "{host}:{port}");
        }
        let none = ImageHosts::default().get("https://example.com/a.png");
        assert!(none.unwrap_err().contains("--allow-image-urls"));
    }

    #[cfg(feature = "pull")]
    #[test]
    fn addresses_are_judged() {
        let hosts = ImageHosts::new(&["example.com".into(), "127.0.0.1".into(), "[::1]".into()]);
        assert!(fetch::judge(&hosts, "https://example.com/a.png").is_ok());
        for url in [
            "http://example.com/a.png",
            "file:///etc/passwd",
            "ftp://example.com/a.png",
            "https://example.com@evil.org/a.png",
            "https://user:word@example.com/a.png",
            "https://evil.org/a.png",
            "https:///a.png",
            "a.png",
        ] {
            assert!(fetch::judge(&hosts, url).is_err(), "{url}");
        }
        // A host of the list whose address is not public is never connected to.
        for url in ["https://127.0.0.1/a.png", "https://[::1]/a.png"] {
            let error = hosts.get(url).unwrap_err();
            assert!(error.contains("not of the open network"), "{error}");
        }
        let from = "https://example.com/a/b.png".parse().unwrap();
        for (to, expected) in [
            ("/c.png", "https://example.com/c.png"),
            ("c.png", "https://example.com/a/c.png"),
            ("//evil.org/c.png", "https://evil.org/c.png"),
            ("http://example.com/c.png", "http://example.com/c.png"),
        ] {
            assert_eq!(fetch::target(&from, to), expected);
        }
    }
}
