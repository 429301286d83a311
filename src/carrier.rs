//! What moves messages between nodes, and the settings that choose it, as types.
#![forbid(unsafe_code)]

use crate::transport;
use std::convert::Infallible;
use std::fmt;
use std::str::FromStr;

/// What settings and tables call the vendor library.
const VENDOR: &str = "vendor";
/// What the setting is where nothing is asked for.
const AUTO: &str = "auto";

/// What moves a collective's messages between nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Carrier {
    /// The vendor library, over a communicator of its own.
    Vendor,
    /// The transport of Strata's, or of the program's, that the registry has under this name.
    Own(&'static str),
}

impl Carrier {
    /// Strata's transport over MPI.
    pub const MPI: Carrier = Carrier::Own("mpi");
    /// Strata's transport over TCP.
    pub const TCP: Carrier = Carrier::Own("tcp");

    /// Its name in variables, tuning tables and the log.
    pub fn name(self) -> &'static str {
        match self {
            Carrier::Vendor => VENDOR,
            Carrier::Own(name) => name,
        }
    }

    /// The same, where there may be no second node.
    pub fn name_of(carrier: Option<Carrier>) -> &'static str {
        carrier.map_or("none", Carrier::name)
    }

    /// Whether it is a transport of Strata's, not the vendor library's.
    pub fn is_own(self) -> bool {
        self != Carrier::Vendor
    }
}

impl FromStr for Carrier {
    type Err = String;

    /// The carrier of this name, or what is wrong with the name and which one is near.
    fn from_str(text: &str) -> Result<Carrier, String> {
        if text == VENDOR {
            return Ok(Carrier::Vendor);
        }
        transport::named(text).map(Carrier::Own).ok_or_else(|| {
            let known: Vec<&str> = transport::names().into_iter().chain([VENDOR]).collect();
            let near = known.iter().map(|name| (strsim::damerau_levenshtein(name, text), name)).min();
            let near = near.filter(|(far, _)| *far <= text.len().div_ceil(2));
            let meant = near.map_or(String::new(), |(_, name)| format!("did you mean {name}? "));
            let known = known.join(", ");
            match text.strip_suffix('!') {
                _ if text.is_empty() => format!("the carrier's name is missing; there are {known}"),
                Some(_) => {
                    format!("{text}: only a further carrier of STRATA_CARRIERS can be required by !, not its first")
                }
                None => format!("there is no carrier {text}; {meant}there are {known}"),
            }
        })
    }
}

/// The setting `STRATA_CARRIERS` as it is written. Names are looked up when a communicator is made: programs may register
/// transports until then.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Carriers(String);

/// What [`Carriers`] means.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WantedCarriers {
    /// The communicator's own.
    pub own: Inter,
    /// The others, in their order.
    pub further: Vec<FurtherCarrier>,
}

/// One that a communicator has beside its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FurtherCarrier {
    /// Which.
    pub carrier: Carrier,
    /// Whether there is no communicator where a rank lacks it; else it is left out there.
    pub required: bool,
}

impl Carriers {
    /// The setting of communicators that have their own carrier alone.
    pub fn alone() -> Carriers {
        Carriers(AUTO.to_string())
    }

    /// The carriers that it names; the error says what is wrong with it.
    pub fn read(&self) -> Result<WantedCarriers, String> {
        let wrong = |what: &str| format!("STRATA_CARRIERS={self}: {what}");
        let mut names = self.0.split(',').map(str::trim);
        let own = match names.next().unwrap_or(AUTO) {
            AUTO => Inter::Auto,
            name => Inter::Only(own_carrier(name).map_err(|what| wrong(&what))?),
        };
        let mut further: Vec<FurtherCarrier> = Vec::new();
        for name in names {
            let (name, required) = name.strip_suffix('!').map_or((name, false), |name| (name, true));
            let carrier = own_carrier(name).map_err(|what| wrong(&what))?;
            if own == Inter::Only(carrier) || further.iter().any(|known| known.carrier == carrier) {
                return Err(wrong(&format!("{name} is named twice")));
            }
            further.push(FurtherCarrier { carrier, required });
        }
        Ok(WantedCarriers { own, further })
    }
}

/// A carrier that communicators may choose beside others.
fn own_carrier(name: &str) -> Result<Carrier, String> {
    if name.is_empty() {
        return Err("a name is empty".to_string());
    }
    match name.parse()? {
        Carrier::Vendor => Err("vendor moves messages only in front of a vendor library".to_string()),
        carrier => Ok(carrier),
    }
}

impl FromStr for Carriers {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Carriers, Infallible> {
        Ok(Carriers(text.to_string()))
    }
}

impl fmt::Display for Carriers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The setting `STRATA_INTER`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Inter {
    /// Nothing is asked for.
    Auto,
    /// This one is asked for.
    Only(Carrier),
    /// A text that names none. No communicator is made with it.
    Unknown(String),
}

impl Inter {
    /// The texts that are no name of a transport.
    pub const WORDS: [&'static str; 2] = [AUTO, VENDOR];

    /// The texts that it takes, for messages: `auto, vendor, mpi and tcp`.
    pub fn choices() -> String {
        let mut names = Inter::WORDS.to_vec();
        names.extend(transport::names());
        let last = names.pop().unwrap_or_default();
        format!("{} and {last}", names.join(", "))
    }

    /// What moves messages in front of a vendor library, where one of Strata's has to be asked for.
    pub fn in_front(&self) -> Carrier {
        match self {
            Inter::Only(carrier) => *carrier,
            Inter::Auto | Inter::Unknown(_) => Carrier::Vendor,
        }
    }
}

impl FromStr for Inter {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Inter, Infallible> {
        Ok(match (text, transport::named(text)) {
            (AUTO, _) => Inter::Auto,
            (VENDOR, _) => Inter::Only(Carrier::Vendor),
            (_, Some(name)) => Inter::Only(Carrier::Own(name)),
            (other, None) => Inter::Unknown(other.to_string()),
        })
    }
}

impl fmt::Display for Inter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Inter::Auto => AUTO,
            Inter::Only(carrier) => carrier.name(),
            Inter::Unknown(text) => text,
        })
    }
}

/// The settings that are on, off, or left to Strata.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Switch {
    /// Strata decides.
    Auto,
    /// On.
    On,
    /// Off.
    Off,
}

impl FromStr for Switch {
    type Err = String;

    fn from_str(text: &str) -> Result<Switch, String> {
        match text {
            "auto" => Ok(Switch::Auto),
            "on" | "1" | "true" => Ok(Switch::On),
            "off" | "0" | "false" => Ok(Switch::Off),
            other => Err(format!("{other} is none of auto, on and off")),
        }
    }
}

impl fmt::Display for Switch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Switch::Auto => "auto",
            Switch::On => "on",
            Switch::Off => "off",
        })
    }
}

/// The setting `STRATA_DEVICE`: where communicators that are made without a vendor library work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceSetting {
    /// On the GPU of the calling thread's context, if it has one.
    Auto,
    /// On the host.
    Host,
}

impl FromStr for DeviceSetting {
    type Err = String;

    fn from_str(text: &str) -> Result<DeviceSetting, String> {
        match text {
            "auto" => Ok(DeviceSetting::Auto),
            "host" => Ok(DeviceSetting::Host),
            other => Err(format!("{other} is none of auto and host")),
        }
    }
}

impl fmt::Display for DeviceSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DeviceSetting::Auto => "auto",
            DeviceSetting::Host => "host",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_read_as_they_are_written() {
        for text in ["auto", "vendor", "mpi", "tcp", "infiniband", ""] {
            assert_eq!(text.parse::<Inter>().unwrap().to_string(), text);
        }
        // The constants are names that the registry has.
        for own in [Carrier::MPI, Carrier::TCP] {
            assert_eq!(own.name().parse(), Ok(Inter::Only(own)));
        }
        assert_eq!("infiniband".parse(), Ok(Inter::Unknown("infiniband".to_string())));
        for text in ["auto", "on", "off"] {
            assert_eq!(text.parse::<Switch>().unwrap().to_string(), text);
        }
        assert_eq!(("1".parse(), "false".parse()), (Ok(Switch::On), Ok(Switch::Off)));
        assert!("maybe".parse::<Switch>().is_err() && "gpu".parse::<DeviceSetting>().is_err());
        assert_eq!("host".parse::<DeviceSetting>().unwrap().to_string(), "host");
    }

    #[test]
    fn further_carriers_follow_the_communicator_s_own_and_wrong_ones_are_told_with_the_nearest_name() {
        let read = |text: &str| text.parse::<Carriers>().unwrap().read();
        let further = |carrier, required| FurtherCarrier { carrier, required };
        assert_eq!(read("auto"), Ok(WantedCarriers { own: Inter::Auto, further: vec![] }));
        let wanted = WantedCarriers { own: Inter::Only(Carrier::TCP), further: vec![further(Carrier::MPI, false)] };
        assert_eq!(read("tcp, mpi"), Ok(wanted));
        let wanted = WantedCarriers { own: Inter::Auto, further: vec![further(Carrier::TCP, true)] };
        assert_eq!(read("auto,tcp!"), Ok(wanted));
        for (text, part) in [
            ("tcp,mpl", "there is no carrier mpl; did you mean mpi? there are mpi, tcp, vendor"),
            ("infiniband", "there is no carrier infiniband; there are"),
            ("tcp,tcp", "tcp is named twice"),
            ("auto,mpi,mpi!", "mpi is named twice"),
            ("tcp,auto", "there is no carrier auto"),
            ("tcp,", "a name is empty"),
            ("mpi!", "only a further carrier"),
            ("tcp,vendor", "only in front of a vendor library"),
        ] {
            let told = read(text).unwrap_err();
            assert!(told.starts_with(&format!("STRATA_CARRIERS={text}: ")) && told.contains(part), "{told}");
        }
    }

    #[test]
    fn in_front_of_a_vendor_library_its_own_transport_is_the_default() {
        let inter = |text: &str| text.parse::<Inter>().unwrap().in_front();
        assert_eq!(["auto", "vendor", "mpi", "tcp"].map(inter).map(Carrier::name), ["vendor", "vendor", "mpi", "tcp"]);
    }
}
