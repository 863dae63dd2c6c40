//! The short examples, as their users run them.

use std::process::Command;

/// What a program prints; it ends well.
fn output(program: &str, args: &[&str]) -> String {
    let output = Command::new(program).args(args).output().expect("it runs");
    let (said, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{program} {args:?}: {}: {said}{errors}", output.status);
    said.into_owned()
}

#[test]
fn hello_is_sent_back() {
    assert_eq!(output(env!("CARGO_BIN_EXE_hello"), &[]), "hello, world\n");
}

#[test]
fn two_ends_in_one_function_print_each_message() {
    let said = output(env!("CARGO_BIN_EXE_raw_conn"), &[]);
    assert!(said.lines().count() > 2, "{said}");
}

#[test]
fn a_gateway_answers_with_what_others_have_answered() {
    let said = output(env!("CARGO_BIN_EXE_gateway"), &[]);
    let expected = ["apple: red", "pear: green", "plum: blue", "grape: refused by the server: garbage arguments"];
    assert_eq!(said.lines().collect::<Vec<_>>(), expected);
}

#[test]
fn one_loop_serves_and_does_other_work() {
    for run in ["epoll", "spin"] {
        let said = output(env!("CARGO_BIN_EXE_own_loop"), &[run]);
        assert_eq!(said, "1000 calls and 4000 bytes were answered in one loop\n", "{run}");
    }
}

#[test]
fn an_unknown_loop_is_refused() {
    let output = Command::new(env!("CARGO_BIN_EXE_own_loop")).arg("wait").output().expect("it runs");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && errors.contains("own_loop epoll|spin"), "{errors}");
}
