//go:build unix

package servers

import (
	"errors"
	"os/user"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
)

func TestPostgreSQLConfig(t *testing.T) {
	lines := strings.Split(postgresqlConfig(23456), "\n")
	for _, want := range []string{
		"listen_addresses = '127.0.0.1'", "port = 23456", "unix_socket_directories = ''",
		"max_connections = 200", "max_prepared_transactions = 0", "fsync = on",
	} {
		if !slices.Contains(lines, want) {
			t.Errorf("the configuration lacks %q", want)
		}
	}
	// Tests of commits must see what users get.
	if strings.Contains(postgresqlConfig(1), "synchronous_commit") {
		t.Error("the configuration changes synchronous_commit")
	}
	if !strings.HasPrefix(postgresqlAccess, "host all all 127.0.0.1/32 ") || strings.Count(postgresqlAccess, "\n") != 1 {
		t.Errorf("more than the loopback address may connect: %q", postgresqlAccess)
	}
}

func TestRabbitMQConfigStaysInItsFolder(t *testing.T) {
	ports := rabbitmqPorts{amqp: 21001, distribution: 21002, epmd: 21003}
	environment := rabbitmqEnvironment("/tmp/f", "/bin", ports)
	for _, want := range []string{
		"HOME=/tmp/f", "PATH=/bin", "ERL_EPMD_PORT=21003", "ERL_EPMD_ADDRESS=127.0.0.1",
		"RABBITMQ_NODE_PORT=21001", "RABBITMQ_DIST_PORT=21002", "RABBITMQ_MNESIA_BASE=/tmp/f/mnesia",
	} {
		if !slices.Contains(environment, want) {
			t.Errorf("the environment lacks %q", want)
		}
	}
	paths := regexp.MustCompile(`^RABBITMQ_\w+(FILES?|BASE|DIR)=`)
	for _, variable := range environment {
		if paths.MatchString(variable) && !strings.Contains(variable, "=/tmp/f/") {
			t.Errorf("%q is outside the folder", variable)
		}
	}
	files := rabbitmqFiles(ports)
	if got := files["rabbitmq.conf"]; got != "listeners.tcp.1 = 127.0.0.1:21001\n" {
		t.Errorf("rabbitmq.conf = %q", got)
	}
	if got := files["enabled_plugins"]; got != "[].\n" {
		t.Errorf("enabled_plugins = %q", got)
	}
}

func TestServerUser(t *testing.T) {
	users := func(names ...string) func(string) (*user.User, error) {
		return func(name string) (*user.User, error) {
			if slices.Contains(names, name) {
				return &user.User{Uid: map[string]string{"postgres": "101", "nobody": "65534"}[name], Gid: "104"}, nil
			}
			return nil, user.UnknownUserError(name)
		}
	}
	tests := []struct {
		name  string
		uid   int
		users []string
		want  *syscall.Credential
		err   bool
	}{
		{"not root", 1000, []string{"postgres"}, nil, false},
		{"postgres", 0, []string{"nobody", "postgres"}, &syscall.Credential{Uid: 101, Gid: 104}, false},
		{"nobody", 0, []string{"nobody"}, &syscall.Credential{Uid: 65534, Gid: 104}, false},
		{"neither", 0, nil, nil, true},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			got, err := serverUser(test.uid, users(test.users...))
			if (err != nil) != test.err {
				t.Fatalf("error %v, want one: %v", err, test.err)
			}
			if (got == nil) != (test.want == nil) || got != nil && (got.Uid != test.want.Uid || got.Gid != test.want.Gid) {
				t.Errorf("serverUser() = %+v, want %+v", got, test.want)
			}
		})
	}
}

func TestServerString(t *testing.T) {
	server := Server{Kind: KindRabbitMQ, Address: "amqp://guest:guest@127.0.0.1:20001/", Origin: OriginPrivate, Version: "3.10.8"}
	if got, want := server.String(), "RabbitMQ 3.10.8: private server, 127.0.0.1:20001"; got != want {
		t.Errorf("String() = %q, want %q", got, want)
	}
}

func TestSetCloseJoinsErrors(t *testing.T) {
	first, second := errors.New("first"), errors.New("second")
	set := Set{Servers: []Server{
		{stop: func() error { return first }}, {}, {stop: func() error { return second }},
	}}
	if err := set.Close(); !errors.Is(err, first) || !errors.Is(err, second) {
		t.Errorf("Close() = %v", err)
	}
}
