package engine_test

import (
	"strings"
	"testing"

	"github.com/devmappa/watermill-inbox/internal/dialect"
	"github.com/devmappa/watermill-inbox/internal/engine"
)

// pool is a driver's that does nothing.
type pool struct{ engine.Pool }

func (pool) Driver() engine.Driver { return engine.Driver{} }

// Modules that are out of step say so, instead of doing half of what they should.
func TestNewRefusesAnotherVersion(t *testing.T) {
	t.Parallel()
	config := engine.Config{Version: engine.Version, Package: "inboxpgx", Pool: pool{}, Dialect: dialect.PostgreSQL{}}
	if _, err := engine.New(config); err != nil {
		t.Fatal(err)
	}
	for _, version := range []int{0, engine.Version - 1, engine.Version + 1} {
		config.Version = version
		if _, err := engine.New(config); err == nil || !strings.HasPrefix(err.Error(), "inboxpgx: ") || !strings.Contains(err.Error(), "upgrade") {
			t.Errorf("version %d: %v", version, err)
		}
	}
}
