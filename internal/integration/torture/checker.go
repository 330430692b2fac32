//go:build unix

package main

import (
	"cmp"
	"context"
	"database/sql"
	"fmt"
	"slices"
	"strings"
)

// finalState is what there is when all has come to rest.
type finalState struct {
	sent     map[string]int64           // payments and their cents
	tapped   map[string]map[string]int  // published events: payment, UUID, copies
	ledger   map[string][]int64         // payment: cents of each row
	audits   map[string]int             // payment: rows
	invoices map[[2]string]int          // payment and event: rows
	claims   map[string]map[string]bool // consumer: message ids
	unsent   map[string]int             // message id: rows with stored messages that are not known to be sent
	relayed  int                        // publishes of the relays
	poisoned []string                   // why, of each message
}

func readState(ctx context.Context, db *sql.DB, sent map[string]int64, tapped map[string]map[string]int) (*finalState, error) {
	s := &finalState{
		sent: sent, tapped: tapped, ledger: map[string][]int64{}, audits: map[string]int{}, invoices: map[[2]string]int{},
		claims: map[string]map[string]bool{}, unsent: map[string]int{},
	}
	for query, keep := range map[string]func(first, second string, number int64){
		`SELECT payment, '', cents FROM ledger`: func(id, _ string, cents int64) { s.ledger[id] = append(s.ledger[id], cents) },
		`SELECT payment, '', count(*) FROM audits GROUP BY payment`: func(id, _ string, rows int64) {
			s.audits[id] = int(rows)
		},
		`SELECT payment, event, count(*) FROM invoices GROUP BY payment, event`: func(id, event string, rows int64) {
			s.invoices[[2]string{id, event}] = int(rows)
		},
		`SELECT message_id, '', count(*) FROM watermill_inbox_unsent GROUP BY message_id`: func(id, _ string, rows int64) {
			s.unsent[id] = int(rows)
		},
		`SELECT consumer, message_id, 0 FROM watermill_inbox`: func(consumer, id string, _ int64) {
			if s.claims[consumer] == nil {
				s.claims[consumer] = map[string]bool{}
			}
			s.claims[consumer][id] = true
		},
	} {
		if err := readRows(ctx, db, query, keep); err != nil {
			return nil, fmt.Errorf("%s: %w", query, err)
		}
	}
	return s, nil
}

func readRows(ctx context.Context, db *sql.DB, query string, keep func(string, string, int64)) error {
	rows, err := db.QueryContext(ctx, query)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		var (
			first, second string
			number        int64
		)
		if err := rows.Scan(&first, &second, &number); err != nil {
			return err
		}
		keep(first, second, number)
	}
	return rows.Err()
}

// check returns what is wrong with the state, in words; nothing when every promise is kept.
func (s *finalState) check() []string {
	var wrong violations
	for id, cents := range s.sent {
		rows := s.ledger[id]
		switch {
		case len(rows) == 0:
			wrong.add("payment never booked", id)
		case len(rows) > 1:
			wrong.add("payment booked more than once", fmt.Sprintf("%s, %d times", id, len(rows)))
		case rows[0] != cents:
			wrong.add("payment booked with another sum", id)
		}
		switch rows := s.audits[id]; {
		case rows == 0:
			wrong.add("payment never audited by the second consumer", id)
		case rows > 1:
			wrong.add("payment audited more than once", fmt.Sprintf("%s, %d times", id, rows))
		}
		switch published := s.tapped[id]; {
		case len(published) == 0:
			wrong.add("event never published", "of "+id)
		case len(published) > 1:
			wrong.add("event published under several UUIDs", fmt.Sprintf("of %s, %d of them", id, len(published)))
		}
	}
	for id := range s.ledger {
		if _, ok := s.sent[id]; !ok {
			wrong.add("booking of nothing that was sent", id)
		}
	}
	for id, uuids := range s.tapped {
		for uuid := range uuids {
			switch rows := s.invoices[[2]string{id, uuid}]; {
			case rows == 0:
				wrong.add("published event never invoiced", uuid)
			case rows > 1:
				wrong.add("event invoiced more than once", fmt.Sprintf("%s, %d times", uuid, rows))
			}
		}
	}
	invoiced := map[string]int{}
	for key := range s.invoices {
		invoiced[key[1]]++
		if s.tapped[key[0]][key[1]] == 0 {
			wrong.add("invoice of an event that nobody has published", key[1])
		}
	}
	for id, rows := range s.unsent {
		wrong.add("stored messages still unsent", fmt.Sprintf("of %s, %d rows", id, rows))
	}
	// The relay is for what crashes and outages leave. The router must have published and marked most.
	if s.relayed > len(s.sent)/2 {
		wrong.add("stored messages left to the relay", fmt.Sprintf("%d publishes, of %d payments", s.relayed, len(s.sent)))
	}
	for _, reason := range s.poisoned {
		wrong.add("message poisoned", reason)
	}
	s.compareClaims(&wrong, bookings, keysOf(s.ledger))
	s.compareClaims(&wrong, audits, keysOf(s.audits))
	s.compareClaims(&wrong, invoices, keysOf(invoiced))
	return wrong.words()
}

func (s *finalState) compareClaims(wrong *violations, consumer string, rows map[string]bool) {
	for id := range s.claims[consumer] {
		if !rows[id] {
			wrong.add("claim without an effect in "+consumer, id)
		}
	}
	for id := range rows {
		if !s.claims[consumer][id] {
			wrong.add("effect without a claim in "+consumer, id)
		}
	}
}

func keysOf[V any](m map[string]V) map[string]bool {
	keys := map[string]bool{}
	for key := range m {
		keys[key] = true
	}
	return keys
}

// violations are by kind, with the smallest example.
type violations map[string][]string

func (v *violations) add(kind, example string) {
	if *v == nil {
		*v = violations{}
	}
	(*v)[kind] = append((*v)[kind], example)
}

func (v violations) words() []string {
	var words []string
	for kind, examples := range v {
		words = append(words, fmt.Sprintf("%s: %d (%s)", kind, len(examples), slices.Min(examples)))
	}
	slices.SortFunc(words, func(a, b string) int { return cmp.Compare(strings.ToLower(a), strings.ToLower(b)) })
	return words
}
