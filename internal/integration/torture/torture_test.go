//go:build unix

package main

import (
	"bytes"
	"context"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	amqp091 "github.com/rabbitmq/amqp091-go"

	"github.com/devmappa/watermill-inbox/internal/servers"
)

// A short run: the inbox keeps its promise, and a wrong one is convicted. The program is built without the race
// detector: watermill-amqp v2.1.3 has races of its own when it connects again.
func TestTorture(t *testing.T) {
	t.Parallel()
	binary := filepath.Join(t.TempDir(), "torture")
	if out, err := exec.Command("go", "build", "-o", binary, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for name, verdict := range map[string]string{
		part{inbox: ours, database: postgresqlName}.String():            "verdict: every payment once",
		part{inbox: checkThenInsert, database: postgresqlName}.String(): "payment booked more than once",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cmd := exec.Command(binary, "-time", minimum.String(), "-seed", "4", "-only", name)
			out, err := cmd.CombinedOutput()
			t.Log(string(out))
			if err != nil || !bytes.Contains(out, []byte(verdict)) {
				t.Errorf("%v, want the words %q", err, verdict)
			}
			if bytes.Contains(out, []byte("\n  0 faults;")) || bytes.Contains(out, []byte(" 0 payments;")) {
				t.Error("nothing has happened")
			}
		})
	}
}

// Every single fault in an otherwise right state is found, and named.
func TestCheckerConvicts(t *testing.T) {
	t.Parallel()
	right := func() *finalState {
		return &finalState{
			sent:     map[string]int64{"p1": 5, "p2": 7},
			tapped:   map[string]map[string]int{"p1": {"e1": 2}, "p2": {"e2": 1}},
			ledger:   map[string][]int64{"p1": {5}, "p2": {7}},
			audits:   map[string]int{"p1": 1, "p2": 1},
			invoices: map[[2]string]int{{"p1", "e1"}: 1, {"p2", "e2"}: 1},
			claims: map[string]map[string]bool{
				bookings: {"p1": true, "p2": true}, audits: {"p1": true, "p2": true}, invoices: {"e1": true, "e2": true},
			},
			relayed: 1,
		}
	}
	if words := right().check(); len(words) > 0 {
		t.Fatalf("a right state is convicted: %q", words)
	}
	for want, spoil := range map[string]func(*finalState){
		"payment never booked":                            func(s *finalState) { delete(s.ledger, "p1") },
		"payment booked more than once":                   func(s *finalState) { s.ledger["p1"] = []int64{5, 5} },
		"payment booked with another sum":                 func(s *finalState) { s.ledger["p1"] = []int64{6} },
		"booking of nothing that was sent":                func(s *finalState) { s.ledger["p3"] = []int64{1} },
		"payment never audited":                           func(s *finalState) { delete(s.audits, "p2") },
		"payment audited more than once":                  func(s *finalState) { s.audits["p2"] = 2 },
		"event never published":                           func(s *finalState) { delete(s.tapped, "p2") },
		"event published under several UUIDs":             func(s *finalState) { s.tapped["p2"]["e3"] = 1 },
		"published event never invoiced":                  func(s *finalState) { delete(s.invoices, [2]string{"p1", "e1"}) },
		"event invoiced more than once":                   func(s *finalState) { s.invoices[[2]string{"p1", "e1"}] = 2 },
		"invoice of an event that nobody has published":   func(s *finalState) { s.invoices[[2]string{"p1", "e9"}] = 1 },
		"claim without an effect in " + bookings:          func(s *finalState) { s.claims[bookings]["p9"] = true },
		"claim without an effect in " + audits:            func(s *finalState) { s.claims[audits]["p9"] = true },
		"claim without an effect in " + invoices:          func(s *finalState) { s.claims[invoices]["e9"] = true },
		"effect without a claim in " + bookings:           func(s *finalState) { delete(s.claims[bookings], "p1") },
		"effect without a claim in " + audits:             func(s *finalState) { delete(s.claims[audits], "p1") },
		"effect without a claim in " + invoices:           func(s *finalState) { delete(s.claims[invoices], "e1") },
		"stored messages still unsent: 1 (of p1, 1 rows)": func(s *finalState) { s.unsent = map[string]int{"p1": 1} },
		"stored messages left to the relay":               func(s *finalState) { s.relayed = 2 },
		"message poisoned: 1 (why)":                       func(s *finalState) { s.poisoned = []string{"why"} },
	} {
		s := right()
		spoil(s)
		if words := s.check(); !slices.ContainsFunc(words, func(text string) bool { return strings.HasPrefix(text, want) }) {
			t.Errorf("want a sentence %q, got %q", want, words)
		}
	}
}

// What the publisher was not told to be stored is sent again, whatever place in a batch it had.
func TestPublisherSendsAgainWhatIsNotConfirmed(t *testing.T) {
	t.Parallel()
	p := newPublisherOf(nil, nil)
	var now []sending
	for _, id := range []string{"a", "b", "c"} {
		now = append(now, sending{time.Now(), bookings, &sentPayment{payment: payment{ID: id}, confirmed: map[string]time.Time{}}})
	}
	ctx := context.Background()
	server, err := servers.StartRabbitMQ(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = server.Stop() }()
	a := &arena{rabbitmq: server}
	if err := a.declare(); err != nil {
		t.Fatal(err)
	}
	channel, closeChannel := a.confirming(t)
	closeChannel() // before the first publish
	unconfirmed, err := p.send(ctx, channel, now)
	if err == nil || len(unconfirmed) != len(now) {
		t.Fatalf("%d of %d are not confirmed, %v", len(unconfirmed), len(now), err)
	}
	p.account(now, unconfirmed, nil)
	if p.again != len(now) || p.sent != 0 || len(p.due) != len(now) {
		t.Errorf("%d to be sent again, %d sent, %d due", p.again, p.sent, len(p.due))
	}
}

func (a *arena) confirming(t *testing.T) (*amqp091.Channel, func()) {
	t.Helper()
	conn, err := amqp091.Dial(a.rabbitmq.URI())
	if err != nil {
		t.Fatal(err)
	}
	channel, err := conn.Channel()
	if err != nil {
		t.Fatal(err)
	}
	if err := channel.Confirm(false); err != nil {
		t.Fatal(err)
	}
	return channel, func() { _ = conn.Close() }
}
