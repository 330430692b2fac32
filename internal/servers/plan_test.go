//go:build unix

package servers

import (
	"context"
	"errors"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// fakeMachine is a machine with these files and variables and nothing else.
func fakeMachine(files []string, variables map[string]string) machine {
	return machine{
		getenv: func(name string) string { return variables[name] },
		lookPath: func(program string) (string, error) {
			if !strings.Contains(program, "/") {
				program = "/usr/bin/" + program
			}
			if slices.Contains(files, program) {
				return program, nil
			}
			return "", fs.ErrNotExist
		},
		glob: func(pattern string) ([]string, error) {
			var matches []string
			for _, file := range files {
				if ok, err := filepath.Match(pattern, filepath.Dir(file)); err != nil {
					return nil, err
				} else if ok && !slices.Contains(matches, filepath.Dir(file)) {
					matches = append(matches, filepath.Dir(file))
				}
			}
			return matches, nil
		},
		docker: func(context.Context) bool { return false },
	}
}

var (
	postgresqlFiles15 = []string{"/usr/lib/postgresql/15/bin/initdb", "/usr/lib/postgresql/15/bin/postgres"}
	rabbitmqFiles310  = []string{"/usr/lib/rabbitmq/lib/rabbitmq_server-3.10.8/sbin/rabbitmq-server", "/usr/bin/epmd"}
	bothAddresses     = map[string]string{
		PostgreSQLVariable: "postgres://someone@db:5432/x",
		RabbitMQVariable:   "amqp://guest:guest@broker/",
	}
)

func TestPlan(t *testing.T) {
	both := slices.Concat(postgresqlFiles15, rabbitmqFiles310)
	tests := []struct {
		name      string
		files     []string
		variables map[string]string
		docker    bool
		root      bool
		debian    bool
		wanted    []Kind
		want      map[Kind]Origin // nil: an error
	}{
		{
			name: "addresses come before everything", files: both, variables: bothAddresses, docker: true, root: true, debian: true,
			wanted: kinds, want: map[Kind]Origin{KindPostgreSQL: OriginGiven, KindRabbitMQ: OriginGiven},
		},
		{
			name: "programs come before docker", files: both, docker: true, root: true, debian: true,
			wanted: kinds, want: map[Kind]Origin{KindPostgreSQL: OriginPrivate, KindRabbitMQ: OriginPrivate},
		},
		{
			name: "each server by itself", files: rabbitmqFiles310, variables: map[string]string{PostgreSQLVariable: "postgresql:///x"},
			wanted: kinds, want: map[Kind]Origin{KindPostgreSQL: OriginGiven, KindRabbitMQ: OriginPrivate},
		},
		{
			name: "docker comes before installing", docker: true, root: true, debian: true,
			wanted: kinds, want: map[Kind]Origin{KindPostgreSQL: OriginDocker, KindRabbitMQ: OriginDocker},
		},
		{
			name: "only what is missing is installed", files: postgresqlFiles15, root: true, debian: true,
			wanted: kinds, want: map[Kind]Origin{KindPostgreSQL: OriginPrivate, KindRabbitMQ: OriginInstalled},
		},
		{name: "root elsewhere", root: true, wanted: kinds},
		{name: "not root", debian: true, wanted: kinds},
		{name: "one of two is not enough", files: postgresqlFiles15, wanted: kinds},
		{
			name: "what is not wanted may be missing", files: postgresqlFiles15,
			wanted: []Kind{KindPostgreSQL}, want: map[Kind]Origin{KindPostgreSQL: OriginPrivate},
		},
		{
			name: "a wrong address is an error, not a reason to go on", files: both, variables: map[string]string{RabbitMQVariable: "localhost:5672"},
			wanted: kinds,
		},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			m := fakeMachine(test.files, test.variables)
			m.docker = func(context.Context) bool { return test.docker }
			m.isRoot, m.isDebian = test.root, test.debian
			got, err := plan(context.Background(), m, test.wanted)
			if (err != nil) != (test.want == nil) || !maps.Equal(got, test.want) {
				t.Errorf("plan() = %v, %v, want %v", got, err, test.want)
			}
		})
	}
}

func TestPlanAsksDockerOnlyWhenNeeded(t *testing.T) {
	m := fakeMachine(nil, bothAddresses)
	m.docker = func(context.Context) bool { t.Error("docker was asked"); return false }
	if _, err := plan(context.Background(), m, kinds); err != nil {
		t.Error(err)
	}
}

func TestMissingErrorSaysWhatToDo(t *testing.T) {
	_, err := plan(context.Background(), fakeMachine(postgresqlFiles15, nil), kinds)
	if err == nil {
		t.Fatal("no error for a missing server")
	}
	for _, part := range []string{"no RabbitMQ here", "apt-get install -y --no-install-recommends rabbitmq-server", "docker compose up", "brew install rabbitmq", "export " + RabbitMQVariable + "="} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("the error lacks %q: %v", part, err)
		}
	}
	if strings.Contains(err.Error(), "postgres") {
		t.Errorf("the error names a server that is there: %v", err)
	}
}

func TestNormalize(t *testing.T) {
	tests := []struct{ in, want []Kind }{
		{nil, kinds},
		{[]Kind{KindRabbitMQ, KindPostgreSQL, KindRabbitMQ}, kinds},
		{[]Kind{KindRabbitMQ}, []Kind{KindRabbitMQ}},
	}
	for _, test := range tests {
		if got, err := normalize(test.in); err != nil || !slices.Equal(got, test.want) {
			t.Errorf("normalize(%q) = %q, %v, want %q", test.in, got, err, test.want)
		}
	}
	if _, err := normalize([]Kind{"redis"}); err == nil {
		t.Error("no error for a kind that does not exist")
	}
}

func TestEnsureUsesAddressesAsTheyAre(t *testing.T) {
	// Ports on which nobody listens: nothing is started and nothing waited for.
	ports, err := freePorts(2)
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		PostgreSQLVariable + "=postgres://me:secret@" + loopback(ports[0]) + "/db",
		RabbitMQVariable + "=amqp://me:secret@" + loopback(ports[1]) + "/",
	}
	for _, variable := range want {
		name, value, _ := strings.Cut(variable, "=")
		t.Setenv(name, value)
	}
	set, err := Ensure(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	if got := set.Environ(); !slices.Equal(got, want) {
		t.Errorf("Environ() = %q, want %q", got, want)
	}
	for _, server := range set.Servers {
		if s := server.String(); strings.Contains(s, "secret") || !strings.Contains(s, "address given, 127.0.0.1:") {
			t.Errorf("String() = %q", s)
		}
	}
	if err := set.Close(); err != nil {
		t.Error(err)
	}
}

func TestEnsureErrors(t *testing.T) {
	t.Setenv(PostgreSQLVariable, "host=db password=secret")
	_, err := Ensure(context.Background(), KindPostgreSQL)
	if err == nil || strings.Contains(err.Error(), "secret") {
		t.Errorf("Ensure() with a wrong address: %v", err)
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	cancel(errors.New("enough"))
	if err := install(ctx, nil); err != nil {
		t.Errorf("install() of nothing: %v", err)
	}
}
