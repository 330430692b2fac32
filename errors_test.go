package inbox_test

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"strings"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message/router/middleware"

	inbox "github.com/devmappa/watermill-inbox"
)

type sqlState string

func (s sqlState) Error() string    { return "postgresql" }
func (s sqlState) SQLState() string { return string(s) }

// otherCode is of no database.
type otherCode int

func (c otherCode) Error() string { return "limit exceeded" }
func (c otherCode) Code() int     { return int(c) }

func TestShouldRetryAndShouldPoison(t *testing.T) {
	t.Parallel()
	handlers := errors.New("no funds")
	step := func(step string, err error) error { return &inbox.Error{Step: step, Err: err} }
	state := func(code string) error { return sqlState(code) }
	_, badURL := url.Parse(strings.Repeat("\x7f", 2))
	_, noFile := os.Open("/no/such/file")
	for name, c := range map[string]struct {
		err           error
		retry, poison bool
	}{
		"the handler's own":                    {handlers, true, true},
		"the handler's own, permanent":         {inbox.Permanent(handlers), false, true},
		"permanent, wrapped":                   {fmt.Errorf("wrapped: %w", inbox.Permanent(handlers)), false, true},
		"a recovered panic":                    {middleware.RecoveredPanicError{V: "boom"}, true, true},
		"unique violation":                     {state("23505"), true, true},
		"syntax error":                         {state("42601"), true, true},
		"invalid key":                          {step("key", inbox.ErrInvalidKey), false, true},
		"too old":                              {step("claim", inbox.ErrTooOld), false, true},
		"no publish topic":                     {step("store", inbox.ErrNoPublishTopic), false, true},
		"broken transaction":                   {step("commit", fmt.Errorf("%w: %w", inbox.ErrTransactionBroken, errors.New("in a failed transaction"))), true, true},
		"in flight":                            {step("claim", inbox.ErrInFlight), true, false},
		"no record":                            {step("claim", inbox.ErrNoRecord), true, false},
		"claim, database down":                 {step("claim", &net.OpError{Op: "dial", Err: errors.New("refused")}), true, false},
		"commit answer lost":                   {step("commit", driver.ErrBadConn), true, false},
		"stored messages of a newer version":   {step("replay", inbox.ErrStoredMessages), true, false},
		"context ended under the handler":      {step("handler", errors.Join(handlers, context.Canceled)), true, false},
		"permanent, at a shutdown":             {step("handler", errors.Join(inbox.Permanent(handlers), context.Canceled)), false, false},
		"permanent, past the deadline":         {step("handler", errors.Join(inbox.Permanent(handlers), context.DeadlineExceeded)), false, true},
		"broken only because the context went": {step("commit", errors.Join(inbox.ErrTransactionBroken, context.Canceled)), true, false},
		"cancelled":                            {context.Canceled, true, false},
		"past the message's deadline":          {step("handler", fmt.Errorf("query: %w", context.DeadlineExceeded)), true, false},
		"past the handler's own deadline":      {fmt.Errorf("query: %w", context.DeadlineExceeded), true, true},
		"refused by the outbox":                {step("outbox", state("22P02")), true, true},
		"an outbox without its table":          {step("outbox", state("42P01")), true, false},
		"outbox, the database goes down":       {step("outbox", state("57P01")), true, false},
		"bad connection":                       {driver.ErrBadConn, true, false},
		"a truncated document":                 {fmt.Errorf("decode: %w", io.ErrUnexpectedEOF), true, true},
		"a bad URL":                            {badURL, true, true},
		"a missing file":                       {noFile, true, true},
		"an unknown host":                      {&net.OpError{Op: "dial", Err: &net.DNSError{IsNotFound: true}}, true, true},
		"a port that is none":                  {&net.OpError{Op: "dial", Err: &net.AddrError{Err: "invalid port"}}, true, true},
		"a missing file of the server":         {state("58P01"), true, true},
		"a configured limit":                   {state("53400"), true, true},
		"an I/O error of the server":           {state("58030"), true, false},
		"DNS is away":                          {&net.OpError{Op: "dial", Err: &net.DNSError{IsTemporary: true}}, true, false},
		"statement timeout":                    {state("57014"), true, true},
		"transaction timeout":                  {state("25P04"), true, false},
		"a code that would be SQLite's busy":   {otherCode(1029), true, true},
		"the connection was lost as well":      {step("handler", errors.Join(handlers, driver.ErrBadConn)), true, false},
		"connection closed":                    {net.ErrClosed, true, false},
		"connection refused":                   {&net.OpError{Op: "dial", Err: errors.New("refused")}, true, false},
		"serialization failure":                {state("40001"), true, false},
		"deadlock":                             {fmt.Errorf("update: %w", state("40P01")), true, false},
		"administrator shutdown":               {state("57P01"), true, false},
		"too many connections":                 {state("53300"), true, false},
		"connection failure":                   {state("08006"), true, false},
		"idle in transaction":                  {state("25P03"), true, false},
		"lock timeout":                         {state("55P03"), true, false},
	} {
		if got := inbox.ShouldRetry(middleware.RetryParams{Err: c.err}); got != c.retry {
			t.Errorf("%s: ShouldRetry is %v", name, got)
		}
		if got := inbox.ShouldPoison(c.err); got != c.poison {
			t.Errorf("%s: ShouldPoison is %v", name, got)
		}
	}
	if inbox.ShouldPoison(nil) {
		t.Error("nil would be poisoned")
	}
	if inbox.Permanent(nil) != nil {
		t.Error("Permanent(nil) is not nil")
	}
	if err := inbox.Permanent(handlers); !errors.Is(err, handlers) || err.Error() != handlers.Error() {
		t.Errorf("Permanent hides the error: %v", err)
	}
}
