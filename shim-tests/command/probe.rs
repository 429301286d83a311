//! `strata info --nics --probe` on this host and on soft GPUs behind switches of the test's choosing.

use crate::soft;
use std::path::Path;
use std::process::{Command, Output};

fn info(arguments: &[&str], variables: &[(&str, &str)], drivers: Option<&Path>) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_strata"));
    command.arg("info").args(arguments).envs(variables.iter().copied()).env_remove("LD_LIBRARY_PATH");
    command.envs(drivers.map(|folder| ("LD_LIBRARY_PATH", folder)));
    command.output().expect("the command starts")
}

/// What a run that succeeds prints.
fn probed(variables: &[(&str, &str)], drivers: Option<&Path>) -> String {
    let output = info(&["--nics", "--probe"], variables, drivers);
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).expect("text")
}

/// The lines about a device.
fn of_device<'a>(text: &'a str, device: &str) -> Vec<&'a str> {
    let mut lines = text.lines().skip_while(|line| *line != device);
    assert!(lines.next().is_some(), "no {device} in\n{text}");
    lines.take_while(|line| line.starts_with(' ')).map(str::trim).collect()
}

#[test]
fn every_nic_is_told_with_what_sysfs_and_the_probe_say_and_what_is_not_measured_with_the_reason() {
    let text = probed(&[], None);
    let listed = text.lines().skip_while(|line| !line.starts_with("NIC ")).skip(1).take_while(|line| !line.is_empty());
    let names: Vec<&str> = listed.filter_map(|line| line.split(' ').next()).collect();
    assert!(!names.is_empty(), "{text}");
    for name in names {
        let lines = of_device(&text, &format!("NIC {name}"));
        match lines[..] {
            [fact, figures, ..] => {
                assert!(
                    fact.starts_with("NUMA node: ") && fact.contains("(sysfs: ") && fact.contains("; probe: "),
                    "{text}"
                );
                assert!(figures.contains(" us") || figures.contains("no NUMA node"), "{text}");
            }
            _ => assert!(lines[0].starts_with("not measured: "), "{text}"),
        }
    }
    let said = text.lines().filter(|line| line.starts_with("GPUs are not measured: ")).count();
    let measured = text.lines().any(|line| line.starts_with("GPU ") && !line.starts_with("GPU    PCI"));
    assert!(said == 1 || measured, "{text}");
}

#[test]
fn gpus_that_slow_each_other_are_behind_one_switch() {
    // Slow beside what the host's copies take.
    let rate = ("SOFTGPU_SWITCH_MBS", "500");
    let variables = [("SOFTGPU_EAGER", "1"), ("SOFTGPU_DEVICES", "3"), ("SOFTGPU_SWITCHES", "0,1,0"), rate];
    for drivers in [soft::cuda_dir(), soft::hip_dir()] {
        let mut texts = Vec::new();
        // On a host that is busy with other things the figures may not tell.
        let found = (0..5).any(|_| {
            let text = probed(&variables, Some(&drivers));
            let fact = |gpu: &str| of_device(&text, gpu)[0].to_string();
            let with = |other: &str| format!("behind one switch with: {other} (sysfs: -; probe: {other})");
            let facts = ["GPU 0000:01:00.0", "GPU 0000:02:00.0", "GPU 0000:03:00.0"].map(fact);
            let right = [with("0000:03:00.0"), with("no other GPU"), with("0000:01:00.0")];
            for (fact, right) in facts.iter().zip(&right) {
                assert!(fact == right || fact.contains("unknown"), "wrong: {fact}\n{text}");
            }
            let found = facts == right;
            texts.push(text);
            found
        });
        assert!(found, "{}", texts.join("\n"));
    }
}

#[test]
fn the_probe_is_of_this_machine_and_of_nics() {
    for (arguments, said) in [(&["--probe"][..], "--nics"), (&["--nics", "--probe", "--sysfs", "/sys"], "--sysfs")] {
        let output = info(arguments, &[], None);
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(text.contains(said), "{text}");
    }
}
