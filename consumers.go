package inbox

import (
	"errors"
	"fmt"
	"slices"
)

// Consumers are the consumers that a service owns, by their names in the records, see [Options].Consumer. A table may
// be shared by services that do not know each other's retentions and brokers, so whatever is done with records for a
// service, rather than for a message, is done with those of its own consumers only.
//
// The zero value is none, and refused wherever it is required.
type Consumers struct {
	names []string
	all   bool
}

// NamedConsumers are the ones with these names.
func NamedConsumers(names ...string) Consumers { return Consumers{names: slices.Clone(names)} }

// AllConsumers are all that have records, for a table that is one service's alone.
func AllConsumers() Consumers { return Consumers{all: true} }

// Contains reports whether the consumer is one of them.
func (c Consumers) Contains(consumer string) bool {
	return c.all || slices.Contains(c.names, consumer)
}

// Validate returns an error when there are none, or when a name cannot be one.
func (c Consumers) Validate() error {
	if !c.all && len(c.names) == 0 {
		return errors.New("inbox: the consumers that the service owns are missing; inbox.AllConsumers() is for a table that is one service's alone")
	}
	for _, name := range c.names {
		if err := validatePart("consumer", name); err != nil {
			return fmt.Errorf("inbox: consumers: %w", err)
		}
	}
	return nil
}
