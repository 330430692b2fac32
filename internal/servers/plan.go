//go:build unix

package servers

import (
	"context"
	"fmt"
	"slices"
	"strings"
)

// Origin is where a server came from.
type Origin string

// The origins, in the order in which [Ensure] tries them.
const (
	OriginGiven     Origin = "address given"
	OriginPrivate   Origin = "private server"
	OriginDocker    Origin = "docker container"
	OriginInstalled Origin = "private server, package just installed"
)

// plan decides the origin of each server asked for, and starts nothing.
func plan(ctx context.Context, m machine, wanted []Kind) (map[Kind]Origin, error) {
	origins := make(map[Kind]Origin)
	var missing []Kind
	for _, kind := range wanted {
		switch {
		case m.getenv(kind.Variable()) != "":
			if _, err := parseAddress(kind, m.getenv(kind.Variable())); err != nil {
				return nil, err
			}
			origins[kind] = OriginGiven
		case m.found(kind):
			origins[kind] = OriginPrivate
		default:
			missing = append(missing, kind)
		}
	}
	if len(missing) == 0 {
		return origins, nil
	}
	var origin Origin
	switch {
	case m.docker(ctx):
		origin = OriginDocker
	case m.isRoot && m.isDebian:
		origin = OriginInstalled
	default:
		return nil, missingError(missing)
	}
	for _, kind := range missing {
		origins[kind] = origin
	}
	return origins, nil
}

// packages are the names of the server's package in each package manager.
var packages = map[Kind]struct{ debian, fedora, brew string }{
	KindPostgreSQL: {"postgresql", "postgresql-server", "postgresql@17"},
	KindRabbitMQ:   {"rabbitmq-server", "rabbitmq-server", "rabbitmq"},
}

// missingError says what to do about the servers that cannot be had.
func missingError(missing []Kind) error {
	var names, debian, fedora, brew, services, variables []string
	for _, kind := range missing {
		p := packages[kind]
		names = append(names, kind.String())
		debian, fedora, brew = append(debian, p.debian), append(fedora, p.fedora), append(brew, p.brew)
		services = append(services, string(kind))
		variables = append(variables, kind.Variable()+"="+exampleAddress[kind])
	}
	return fmt.Errorf(`servers: no %s here. Do one of:
  Debian, Ubuntu   sudo apt-get install -y --no-install-recommends %s
  Fedora, RHEL     sudo dnf install -y %s
  macOS            brew install %s
  Docker           docker compose up -d --wait %s   (in the repository, then set the variables)
  servers you have export %s
A private server is started from what is installed; no system service has to run`,
		strings.Join(names, " and no "), strings.Join(debian, " "), strings.Join(fedora, " "),
		strings.Join(brew, " "), strings.Join(services, " "), strings.Join(variables, " "))
}

// exampleAddress is what docker-compose.yml serves on the standard ports.
var exampleAddress = map[Kind]string{
	KindPostgreSQL: "'postgres://postgres:postgres@127.0.0.1:5432/postgres?sslmode=disable'",
	KindRabbitMQ:   "'amqp://guest:guest@127.0.0.1:5672/'",
}

// normalize returns the kinds asked for once each, or all when none was.
func normalize(wanted []Kind) ([]Kind, error) {
	if len(wanted) == 0 {
		return kinds, nil
	}
	for _, kind := range wanted {
		if _, err := ParseKind(string(kind)); err != nil {
			return nil, err
		}
	}
	return slices.DeleteFunc(slices.Clone(kinds), func(k Kind) bool { return !slices.Contains(wanted, k) }), nil
}
